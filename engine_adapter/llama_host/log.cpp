#include "llama_host/log.h"

#include "llama.h"

#include <cstdio>
#include <deque>
#include <mutex>
#include <thread>

namespace expertier {

namespace {

constexpr size_t max_lines = 400;

struct Line {
    std::thread::id thread;
    ggml_log_level level;
    std::string text;
};

std::mutex & mutex = *new std::mutex; // never destroyed: the engine may log while the process ends
auto & lines = *new std::deque<Line>;

thread_local std::vector<std::pair<int, std::string>> block_devices;

void keep(ggml_log_level level, const char * text, void *) {
    int block = 0;
    char device[128] = "";
    if (level == GGML_LOG_LEVEL_DEBUG &&
        sscanf(text, "load_tensors: layer %d assigned to device %127[^,\n]", &block, device) == 2) {
        block_devices.emplace_back(block, device);
    }
    std::lock_guard<std::mutex> guard(mutex);
    static bool took_last = false;
    if (level == GGML_LOG_LEVEL_CONT) { // this text continues the line before
        if (took_last && !lines.empty()) {
            lines.back().text += text;
        }
        return;
    }
    took_last = level >= GGML_LOG_LEVEL_INFO; // the engine writes so many debug lines that no others would be left
    if (!took_last) {
        return;
    }
    lines.push_back({ std::this_thread::get_id(), level, text });
    if (lines.size() > max_lines) {
        lines.pop_front();
    }
}

} // namespace

void keep_engine_log() { llama_log_set(keep, nullptr); }

std::string take_engine_log(int level) {
    std::lock_guard<std::mutex> guard(mutex);
    std::string text;
    std::deque<Line> others;
    for (Line & line : lines) {
        if (line.thread != std::this_thread::get_id()) {
            others.push_back(std::move(line));
        } else if (line.level >= level) {
            text += line.text;
        }
    }
    lines.swap(others);
    return text;
}

std::vector<std::pair<int, std::string>> take_block_devices() {
    std::vector<std::pair<int, std::string>> found;
    found.swap(block_devices);
    return found;
}

} // namespace expertier
