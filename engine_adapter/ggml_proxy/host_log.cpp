#include "host_log.h"

#include "llama.h"

#include <deque>
#include <mutex>
#include <utility>

namespace expertier {

namespace {

constexpr size_t max_lines = 400;

std::mutex                                          mutex;
std::deque<std::pair<ggml_log_level, std::string>> lines;

void keep(ggml_log_level level, const char * text, void *) {
    std::lock_guard<std::mutex> guard(mutex);
    static bool kept_last = false;
    if (level == GGML_LOG_LEVEL_CONT) { // goes on with the line before
        if (kept_last && !lines.empty()) {
            lines.back().second += text;
        }
        return;
    }
    kept_last = level >= GGML_LOG_LEVEL_INFO; // the engine's debug lines would push out all others
    if (!kept_last) {
        return;
    }
    lines.emplace_back(level, text);
    if (lines.size() > max_lines) {
        lines.pop_front();
    }
}

} // namespace

void keep_engine_log() { llama_log_set(keep, nullptr); }

std::string take_engine_log(int level) {
    std::lock_guard<std::mutex> guard(mutex);
    std::string                 text;
    for (const auto & [of, line] : lines) {
        if (of >= level) {
            text += line;
        }
    }
    lines.clear();
    return text;
}

} // namespace expertier
