// Starts the tiers inside a command-line tool: a Python interpreter in the tool's own process (`expertier exec`).
#pragma once

namespace expertier {

// Nothing to do unless `expertier exec` asked for it by its variables. False when it did and the tiers did not start;
// the reason is on standard error.
bool start_embedded_tiers();

} // namespace expertier
