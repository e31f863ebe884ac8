// What went wrong, kept for the calling thread: the engine computes a batch on the thread that asked for it, and its own
// statuses tell no more than that a graph failed.
#pragma once

#include <string>

namespace expertier {

// Replaces the thread's error; a tool that Python does not watch is told at once.
void set_error(const std::string & message);

// Returns the thread's error and forgets it; empty where there is none.
std::string take_error();

} // namespace expertier
