// Starts the tiers inside a command-line tool: a Python interpreter in the tool's own process (`expertier exec`).
#pragma once

#include <string>

namespace expertier {

// Nothing to do unless `expertier exec` asked for it by its variables. False when it did and the tiers did not start;
// the reason is on standard error.
bool start_embedded_tiers();

// Whether this process is a tool that `expertier exec` has started the tiers in.
bool is_embedded();

// Whether that tool was given a skeleton to load, in which all expert bytes are zero.
bool loads_skeleton();

// In a tool nobody asks us for errors: they are written to standard error, one line each. Elsewhere does nothing.
void say_in_tool(const std::string & message);

} // namespace expertier
