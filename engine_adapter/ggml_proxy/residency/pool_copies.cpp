#include "residency/pool_copies.h"

#include "residency/layer_lock.h"

namespace expertier {

const char * HostCopies::begin_read(int64_t index) {
    LayerLock lock(copies_.lock, 0);
    const int64_t address = copies_.address[index];
    if (address == 0) {
        return nullptr;
    }
    copies_.readers[index] += 1;
    copies_.used[index] = 1;
    *copies_.hits += 1;
    return reinterpret_cast<const char *>(address);
}

void HostCopies::end_reads(const std::vector<int64_t> & indices) {
    LayerLock lock(copies_.lock, 0);
    for (int64_t index : indices) {
        copies_.readers[index] -= 1;
    }
    lock.notify_all(); // the pool may be waiting for a block without readers
}

void HostCopies::touch(int layer, const std::vector<int32_t> & experts) {
    LayerLock lock(copies_.lock, 0);
    for (int32_t expert : experts) {
        if (expert >= 0) {
            copies_.used[index(layer, expert)] = 1;
        }
    }
}

} // namespace expertier
