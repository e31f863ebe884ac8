#include "driver/capture.h"

#include "driver/state.h"
#include "driver/stream.h"

#include <algorithm>
#include <string>

namespace fake_gpu {

void check_captured(int device, int32_t code, const char * what) {
    if (code) {
        fault(device, std::string(what) + ": error " + std::to_string(code) + " of stream capture");
    }
}

Capture::Capture(Stream & origin) { join(origin); }

size_t Capture::join(Stream & stream) {
    streams_.push_back(&stream);
    known_.emplace_back();
    graph_->devices.push_back(stream.device);
    return streams_.size() - 1;
}

int32_t Capture::add(size_t branch, std::function<void()> run) {
    if (is_spoilt_) {
        return CAPTURE_INVALIDATED;
    }
    Known & known = known_[branch];
    known.resize(std::max(known.size(), branch + 1));
    known[branch] += 1;
    graph_->pieces.push_back({ Graph::Piece::work, branch, std::move(run), 0 });
    return CAPTURE_OK;
}

int32_t Capture::record(size_t branch, Record & out) {
    if (is_spoilt_) {
        return CAPTURE_INVALIDATED;
    }
    out = { graph_->n_records++, known_[branch] };
    graph_->pieces.push_back({ Graph::Piece::record, branch, {}, out.number });
    return CAPTURE_OK;
}

int32_t Capture::wait(size_t branch, const Record & record) {
    if (is_spoilt_) {
        return CAPTURE_INVALIDATED;
    }
    Known & known = known_[branch];
    known.resize(std::max({ known.size(), record.known.size(), branch + 1 }));
    for (size_t i = 0; i < record.known.size(); i++) {
        known[i] = std::max(known[i], record.known[i]);
    }
    known[branch] += 1; // so that a stream which only waits must be joined, too
    graph_->pieces.push_back({ Graph::Piece::wait, branch, {}, record.number });
    return CAPTURE_OK;
}

int32_t Capture::end() {
    has_ended = true;
    if (is_spoilt_) {
        return CAPTURE_INVALIDATED;
    }
    Known & origin = known_[0];
    origin.resize(streams_.size());
    for (size_t branch = 1; branch < streams_.size(); branch++) {
        if (origin[branch] < known_[branch][branch]) {
            return CAPTURE_UNJOINED;
        }
    }
    return CAPTURE_OK;
}

int32_t Capture::spoil(int32_t code) {
    is_spoilt_ = true;
    return code;
}

void Capture::lose(const Stream & stream) {
    std::replace(streams_.begin(), streams_.end(), const_cast<Stream *>(&stream), (Stream *) nullptr);
    is_spoilt_ = true;
}

} // namespace fake_gpu
