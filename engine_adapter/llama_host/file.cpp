#include "llama_host/file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

namespace expertier {

namespace {

int64_t nanoseconds(const struct timespec & time) { return time.tv_sec * 1'000'000'000LL + time.tv_nsec; }

bool is_the_same(const struct stat & found, const expertier_file & wanted) {
    return found.st_size == wanted.n_bytes && (int64_t) found.st_ino == wanted.inode &&
           (int64_t) found.st_dev == wanted.device && nanoseconds(found.st_mtim) == wanted.mtime_ns &&
           nanoseconds(found.st_ctim) == wanted.ctime_ns;
}

} // namespace

ModelFiles::~ModelFiles() {
    for (int descriptor : descriptors_) {
        close(descriptor);
    }
}

bool ModelFiles::open(const expertier_model_options & options, std::string & error) {
    extents_.assign(options.extents, options.extents + options.n_extents);
    header_ = static_cast<const char *>(options.header);
    for (int32_t i = 0; i < options.n_files; i++) {
        const expertier_file & file = options.files[i];
        const int descriptor = ::open(file.path, O_RDONLY | O_CLOEXEC);
        if (descriptor < 0) {
            error = std::string(file.path) + ": " + strerror(errno);
            return false;
        }
        descriptors_.push_back(descriptor);
        struct stat found;
        if (fstat(descriptor, &found) != 0 || !is_the_same(found, file)) {
            error = std::string(file.path) + ": this is not the file that the tiers were made for, or it has changed";
            return false;
        }
    }
    return true;
}

FILE * ModelFiles::stream() { return fopencookie(this, "rb", { read, nullptr, seek, nullptr }); }

ssize_t ModelFiles::read(void * cookie, char * out, size_t wanted) {
    ModelFiles & self = *static_cast<ModelFiles *>(cookie);
    const int64_t end = std::min(self.size(), self.position_ + (int64_t) wanted);
    ssize_t done = 0;
    while (self.position_ < end) {
        const auto extent = std::upper_bound(self.extents_.begin(), self.extents_.end(), self.position_,
                                             [](int64_t at, const expertier_extent & one) { return at < one.end; });
        const ssize_t got = self.read_extent(*extent, out + done, std::min(end, extent->end) - self.position_);
        if (got <= 0) {
            return done > 0 ? done : got;
        }
        self.position_ += got;
        done += got;
    }
    return done;
}

ssize_t ModelFiles::read_extent(const expertier_extent & extent, char * out, int64_t wanted) {
    const int64_t offset = extent.offset + (position_ - extent.begin);
    switch (extent.file) {
    case extent_header:
        memcpy(out, header_ + offset, wanted);
        return wanted;
    case extent_experts:
        return wanted;
    default: {
        const ssize_t got = pread(descriptors_[extent.file], out, wanted, offset);
        if (got > 0) {
            bytes_read_ += got;
            for (const expertier_extent & one : extents_) { // counts by position what was read, whatever `extent` says
                if (one.file == extent_experts) {
                    expert_bytes_ +=
                        std::max<int64_t>(0, std::min(one.end, position_ + got) - std::max(one.begin, position_));
                }
            }
        }
        return got;
    }
    }
}

int ModelFiles::seek(void * cookie, off64_t * offset, int whence) {
    ModelFiles & self = *static_cast<ModelFiles *>(cookie);
    const int64_t from = whence == SEEK_SET ? 0 : whence == SEEK_CUR ? self.position_ : self.size();
    if (from + *offset < 0) {
        errno = EINVAL;
        return -1;
    }
    self.position_ = from + *offset;
    *offset = self.position_;
    return 0;
}

} // namespace expertier
