// The engine's log, kept for error messages instead of printed.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace expertier {

// Starts to keep the engine's log lines (the newest 400).
void keep_engine_log();

// Copies and clears what the calling thread logged, of at least `level` (ggml_log_level), oldest first.
std::string take_engine_log(int level);

// On which device this thread's last load put which block, as the engine said: (block, name). Cleared by this.
std::vector<std::pair<int, std::string>> take_block_devices();

} // namespace expertier
