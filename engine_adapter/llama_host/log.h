// The engine's log, kept for error messages instead of printed.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace expertier {

// Starts to keep the engine's log lines (the newest 400).
void keep_engine_log();

// Takes the lines that the calling thread has logged out of the log, and returns those of at least `level`
// (ggml_log_level), oldest first.
std::string take_engine_log(int level);

// Takes the (block, device name) pairs that the engine has logged on this thread since the last call: which device it
// put each block on.
std::vector<std::pair<int, std::string>> take_block_devices();

} // namespace expertier
