#include "backend/read_back.h"

#include "abi/embedded.h"
#include "residency/errors.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace expertier {

namespace {

constexpr size_t most_at_once = 8u << 20; // bytes read at once, from which rows are then picked

[[noreturn]] void refuse(const ggml_tensor * tensor, const std::string & why) {
    const std::string message = std::string("the engine read expert tensor ") + tensor->name +
                                " back for an operation of its own, and that failed: " + why;
    set_error(message);
    if (!is_embedded()) { // in a tool set_error() has printed it; elsewhere perhaps nobody takes the error
        fprintf(stderr, "expertier: %s\n", message.c_str());
    }
    throw std::runtime_error(message); // to return would give the engine wrong bytes as weights
}

} // namespace

void Readable::add(const ggml_tensor * tensor, Tiers & tiers, MatrixRef ref) {
    by_address_[static_cast<const char *>(tensor->data)] = { ggml_nbytes(tensor), &tiers, ref };
}

void Readable::read(const ggml_tensor * tensor, void * out, size_t offset, size_t size, size_t n_rows, size_t stride,
                    size_t out_stride) const {
    if (size == 0 || n_rows == 0) {
        return;
    }
    const char * first = static_cast<const char *>(tensor->data) + offset;
    const size_t span = (n_rows - 1) * stride + size;
    auto found = by_address_.upper_bound(first);
    if (found == by_address_.begin() || first + span > std::prev(found)->first + std::prev(found)->second.n_bytes) {
        refuse(tensor, "it is no part of a tensor that the tiers serve");
    }
    --found;
    const Matrix & matrix = found->second;
    const size_t begin = first - found->first;
    const auto copy = [&](size_t from, size_t n_bytes, void * to) {
        if (!matrix.tiers->misses().read(matrix.ref, begin + from, n_bytes, to)) {
            refuse(tensor, "its bytes " + std::to_string(begin + from) + " to " +
                               std::to_string(begin + from + n_bytes) +
                               " could not be read from the model's file; check the file and its disk");
        }
    };
    if (n_rows == 1 || (stride == size && out_stride == size)) {
        copy(0, span, out);
        return;
    }
    const size_t at_once = std::max<size_t>(1, most_at_once / std::max<size_t>(stride, 1));
    std::vector<char> rows;
    for (size_t row = 0; row < n_rows; row += at_once) {
        const size_t n = std::min(at_once, n_rows - row);
        rows.resize((n - 1) * stride + size);
        copy(row * stride, rows.size(), rows.data());
        for (size_t i = 0; i < n; i++) {
            memcpy(static_cast<char *>(out) + (row + i) * out_stride, rows.data() + i * stride, size);
        }
    }
}

} // namespace expertier
