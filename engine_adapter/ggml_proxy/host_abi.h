// The C interface of the host shim: it calls llama.h so that Python never mirrors the engine's structs.
#pragma once

#include <cstddef>
#include <cstdint>

#define EXPERTIER_HOST_ABI 2
#define EXPERTIER_EXPORT extern "C" __attribute__((visibility("default")))

// Which file a path must still name: as stat() returned it.
struct expertier_file_identity {
    int64_t n_bytes;
    int64_t mtime_ns;
    int64_t inode;
    int64_t device;
};

struct expertier_model_options {
    int32_t         abi; // EXPERTIER_HOST_ABI
    const char *    path;
    expertier_file_identity identity; // of the file that the tiers read; used with experts_type
    void *          device;       // ggml device to place every layer on; null: the engine's own placement
    void *          experts_type; // ggml buffer type for the expert tensors; null: the engine's own placement
    const char *    experts_regex;
    const int64_t * skip;         // pairs of file offsets [begin, end) that are never read, ascending
    int32_t         n_skip;
    int32_t         repack;       // 1: let the engine repack weights for its own kernels
};

struct expertier_load_counts {
    int64_t bytes_read;   // bytes read from the file while loading
    int64_t expert_bytes; // those of them that lie in the skipped ranges
};

struct expertier_context_options {
    int32_t abi; // EXPERTIER_HOST_ABI
    int32_t n_ctx;
    int32_t n_batch;
    int32_t n_ubatch;
    int32_t n_seq_max;
    int32_t n_threads;
    int32_t flash_attention; // -1 auto, 0 off, 1 on
};
