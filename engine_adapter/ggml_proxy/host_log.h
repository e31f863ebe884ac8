// The engine's log, kept for error messages instead of printed.
#pragma once

#include <string>

namespace expertier {

// Starts to keep the engine's log lines (the newest 400).
void keep_engine_log();

// Copies and clears what the calling thread logged, of at least `level` (ggml_log_level), oldest first.
std::string take_engine_log(int level);

} // namespace expertier
