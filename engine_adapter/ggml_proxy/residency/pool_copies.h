// Reads of the host pool's complete copies of experts, without Python.
#pragma once

#include "abi/abi.h"

#include <vector>

namespace expertier {

class HostCopies {
  public:
    explicit HostCopies(const expertier_host_copies & copies) : copies_(copies) {}
    // `first[layer]` is the index of the layer's expert 0 in the arrays.
    void set_first(std::vector<int64_t> && first) { first_ = std::move(first); }

    int64_t index(int layer, int32_t expert) const { return first_[layer] + expert; }
    // Begins a read of a copy, which must be ended; null when there is none.
    const char * begin_read(int64_t index);
    void end_reads(const std::vector<int64_t> & indices);
    // Marks the pool's copies of `experts`, which L1 has just evicted, as used. An id of -1 stands for no expert.
    void touch(int layer, const std::vector<int32_t> & experts);

  private:
    expertier_host_copies copies_;
    std::vector<int64_t> first_;
};

// Host copies that queued work reads. While the object lives, the pool keeps them.
class HostReads {
  public:
    HostReads() = default;
    HostReads(HostCopies & copies, size_t most) : copies_(&copies) { indices_.reserve(most); }
    ~HostReads() { release(); }
    HostReads(HostReads && other) noexcept { *this = std::move(other); }
    HostReads & operator=(HostReads && other) noexcept {
        release();
        copies_ = other.copies_;
        indices_.swap(other.indices_);
        return *this;
    }

    // Begins to read the expert's copy and returns its address in host memory; null when the pool has none.
    const char * take(int layer, int32_t expert) {
        const int64_t index = copies_->index(layer, expert);
        const char * copy = copies_->begin_read(index);
        if (copy) {
            indices_.push_back(index);
        }
        return copy;
    }
    bool empty() const { return indices_.empty(); }
    // To be called once no queued work reads the copies any more.
    void release() {
        if (!indices_.empty()) {
            copies_->end_reads(indices_);
            indices_.clear();
        }
    }

  private:
    HostCopies * copies_ = nullptr;
    std::vector<int64_t> indices_;
};

} // namespace expertier
