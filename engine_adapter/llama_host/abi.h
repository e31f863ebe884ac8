// The C interface of the host library. The library calls llama.h, so that Python never mirrors the engine's structs.
#pragma once

#include <cstddef>
#include <cstdint>

#define EXPERTIER_HOST_ABI 10
#define EXPERTIER_EXPORT extern "C" __attribute__((visibility("default")))

// A file of the model. The other fields are those of stat(); they tell whether the path still names the same file.
struct expertier_file {
    const char * path;
    int64_t n_bytes;
    int64_t mtime_ns;
    int64_t ctime_ns;
    int64_t inode;
    int64_t device;
};

// Bytes [begin, end) of the GGUF that the loader sees, and where they come from.
struct expertier_extent {
    int64_t begin;
    int64_t end;
    int32_t file;   // index of a file; -1: the merged header; -2: experts, which are not read
    int64_t offset; // in the file or the header, of the byte at `begin`
};

// A proxy device, how many of the model's units are placed on it, and the buffer type for the experts in these units.
struct expertier_placed {
    void * device;
    void * experts_type;
    const char * experts_regex;
    int32_t units; // a unit is a block, or the output, which follows the last block
};

struct expertier_model_options {
    int32_t abi; // EXPERTIER_HOST_ABI
    const char * path;
    const expertier_placed * placed; // the proxy devices, which share the blocks in this order
    int32_t n_placed;                // 0: the model is placed without tiers
    const char * device_names;       // without `placed`: names of devices, separated by commas; null: engine's choice
    const expertier_file * files;    // with `placed`: the files that the tiers read
    int32_t n_files;
    const expertier_extent * extents; // with `placed`: the GGUF that the loader sees, contiguous from 0
    int32_t n_extents;
    const void * header;        // the header of that GGUF, where it is merged from several files; else null
    int32_t experts_in_ram;     // 1: without `placed`, the experts stay on the CPU (-cmoe)
    int32_t is_mapped;          // 0: without `placed`, read the file instead of mapping it
    int32_t repack;             // 1: let the engine repack weights for its own kernels
    const void * params;        // llama_model_params to start from; null: the engine's defaults
    uint64_t params_bytes;      // size of `params`, which must be the size that the engine's headers give
    int32_t splits_tensors;     // 1: the devices share every tensor (-sm tensor), instead of the blocks
    const float * tensor_split; // with `splits_tensors`: each device's share; null: equal shares
    int32_t is_measured;        // 1: only metadata is read, and no memory is allocated; not with `placed`
    int32_t (*goes_on)(void); // called between two tensors; 0 ends the load, which then fails; null: nothing is called
};

// How many models and contexts of this library have not been closed yet.
struct expertier_host_live {
    int32_t models;
    int32_t contexts;
};

struct expertier_load_counts {
    int64_t bytes_read;   // bytes read from the files while loading
    int64_t expert_bytes; // how many of these lie in extents that must not be read
};

struct expertier_context_options {
    int32_t abi; // EXPERTIER_HOST_ABI
    int32_t n_ctx;
    int32_t n_batch;
    int32_t n_ubatch;
    int32_t n_seq_max;
    int32_t n_threads;
    int32_t flash_attention;   // -1 auto, 0 off, 1 on
    uint64_t moe_cache_bytes;  // device memory for the engine's own cache of experts in RAM; 0: none
    const char * tensors_path; // file for all computed tensors (llama_host/tensors.h); null: none
};
