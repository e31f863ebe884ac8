// What is recorded while streams are captured: work in its order, and what of it is done before what.
//
// Whoever calls holds the lock of stream.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace fake_gpu {

class Stream;

// Codes of both vendors' drivers.
enum CaptureCode : int32_t {
    CAPTURE_OK = 0,
    CAPTURE_INVALID_VALUE = 1,
    CAPTURE_OUT_OF_MEMORY = 2,
    CAPTURE_INVALID_HANDLE = 400,
    CAPTURE_ILLEGAL_STATE = 401,
    CAPTURE_NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,   // a call that a captured stream does not take
    CAPTURE_INVALIDATED = 901,   // by an error before
    CAPTURE_MERGE = 902,         // of two captures
    CAPTURE_UNMATCHED = 903,     // the end of a capture that began on another stream
    CAPTURE_UNJOINED = 904,      // work of a stream that joined is not waited for at the end
    CAPTURE_ISOLATION = 905,     // waits for what is not captured
    CAPTURED_EVENT = 907,        // cannot be asked about or waited for outside
    CAPTURE_UPDATE_FAILED = 910, // the graphs are too different
};

// A fault where ggml's backend made the call, since CUDA's ends the process then.
void check_captured(int device, int32_t code, const char * what);

struct Graph {
    struct Piece {
        enum Kind { work, record, wait };
        Kind kind;
        size_t branch;
        std::function<void()> run; // work
        size_t number;             // of a record; the one that a wait is for
    };
    std::vector<int> devices;  // of the branches; the first one is the stream where the capture began
    std::vector<Piece> pieces; // each behind what it waits for
    size_t n_records = 0;
};

class Capture {
  public:
    explicit Capture(Stream & origin);

    // What a stream that waits for a record knows to be done: so many pieces of each branch.
    using Known = std::vector<size_t>;
    struct Record {
        size_t number;
        Known known;
    };

    int32_t add(size_t branch, std::function<void()> run);
    int32_t record(size_t branch, Record & out);
    int32_t wait(size_t branch, const Record & record);
    size_t join(Stream & stream); // its branch
    int32_t end();                // whether it is whole

    // From now on every call is an error; returns the code of this one.
    int32_t spoil(int32_t code);
    int32_t state() const { return is_spoilt_ ? CAPTURE_INVALIDATED : CAPTURE_OK; }
    void lose(const Stream & stream); // it is destroyed

    const std::vector<Stream *> & streams() const { return streams_; } // by branch; null: destroyed
    const std::thread::id thread = std::this_thread::get_id();
    std::shared_ptr<Graph> graph() const { return graph_; }
    bool has_ended = false;

  private:
    std::shared_ptr<Graph> graph_ = std::make_shared<Graph>();
    std::vector<Stream *> streams_;
    std::vector<Known> known_; // by branch
    bool is_spoilt_ = false;
};

} // namespace fake_gpu
