#include "host_file.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace expertier {

namespace {

// The first skipped range that ends after `position`.
auto range_after(const SkippingFile & file, int64_t position) {
    return std::upper_bound(file.skip.begin(), file.skip.end(), position,
                            [](int64_t at, const std::pair<int64_t, int64_t> & range) { return at < range.second; });
}

int64_t overlap_with_skip(const SkippingFile & file, int64_t begin, int64_t end) {
    int64_t total = 0;
    for (auto range = range_after(file, begin); range != file.skip.end() && range->first < end; ++range) {
        total += std::min(end, range->second) - std::max(begin, range->first);
    }
    return total;
}

ssize_t read(void * cookie, char * out, size_t wanted) {
    SkippingFile & file = *static_cast<SkippingFile *>(cookie);
    const int64_t  end  = std::min(file.size, file.position + (int64_t) wanted);
    ssize_t        done = 0;
    while (file.position < end) {
        const auto range = range_after(file, file.position);
        int64_t    step  = end - file.position;
        if (range != file.skip.end() && range->first <= file.position) {
            step = std::min(step, range->second - file.position); // the buffer keeps what it holds
        } else {
            if (range != file.skip.end()) {
                step = std::min(step, range->first - file.position);
            }
            const ssize_t got = pread(file.descriptor, out + done, step, file.position);
            if (got <= 0) {
                return done > 0 ? done : got;
            }
            step = got;
            file.bytes_read += step;
            file.expert_bytes += overlap_with_skip(file, file.position, file.position + step);
        }
        file.position += step;
        done += step;
    }
    return done;
}

int seek(void * cookie, off64_t * offset, int whence) {
    SkippingFile & file = *static_cast<SkippingFile *>(cookie);
    const int64_t  from = whence == SEEK_SET ? 0 : whence == SEEK_CUR ? file.position : file.size;
    if (from + *offset < 0) {
        return -1;
    }
    file.position = from + *offset;
    *offset       = file.position;
    return 0;
}

int close(void * cookie) { return ::close(static_cast<SkippingFile *>(cookie)->descriptor); }

} // namespace

FILE * open_skipping(SkippingFile & file, const char * path, const expertier_file_identity & identity) {
    file.descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (file.descriptor < 0) {
        return nullptr;
    }
    struct stat found;
    if (fstat(file.descriptor, &found) != 0 || found.st_size != identity.n_bytes ||
        (int64_t) found.st_ino != identity.inode || (int64_t) found.st_dev != identity.device ||
        found.st_mtim.tv_sec * 1'000'000'000LL + found.st_mtim.tv_nsec != identity.mtime_ns) {
        ::close(file.descriptor);
        errno = ESTALE;
        return nullptr;
    }
    file.size     = found.st_size;
    file.position = 0;
    FILE * stream = fopencookie(&file, "rb", { read, nullptr, seek, close });
    if (stream == nullptr) {
        ::close(file.descriptor);
        return nullptr;
    }
    return stream;
}

} // namespace expertier
