// The last error of each thread. The engine computes a batch on the thread that asked for it, and its own statuses say
// only that a graph failed, so the reason is kept here.
#pragma once

#include <string>

namespace expertier {

// Replaces the thread's error. In a tool (`expertier exec`), where no Python code takes errors, it is also printed.
void set_error(const std::string & message);

// Returns the thread's error and clears it; empty where there is none.
std::string take_error();

} // namespace expertier
