// Starts the tiers inside a command-line tool: a Python interpreter in the tool's own process (`expertier exec`).
#pragma once

#include <string>

namespace expertier {

// Starts the tiers where the variables of `expertier exec` ask for them; where they do not, does nothing and returns
// true. False when the tiers did not start; the reason is on standard error.
bool start_embedded_tiers();

// Whether this process is a tool that `expertier exec` has started the tiers in.
bool is_embedded();

// Whether that tool was given a skeleton to load, in which all expert bytes are zero.
bool loads_skeleton();

// In a tool, writes an error to standard error as one line, because no Python code reads errors there. Does nothing in
// any other process.
void say_in_tool(const std::string & message);

} // namespace expertier
