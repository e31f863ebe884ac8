#include "backend/expert_buffer.h"

#include "abi/embedded.h"
#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "backend/read_back.h"
#include "residency/errors.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <unordered_map>
#include <vector>

namespace expertier {

namespace {

struct ExpertBuffer {
    std::shared_ptr<Tiers> tiers;
    void * base = nullptr;
    size_t size = 0;
    std::unordered_map<const ggml_tensor *, ExpertTensor> tensors;
    Readable readable;
};

using TiersList = std::vector<std::shared_ptr<Tiers>>;

thread_local TiersList loading_tiers;

constexpr size_t probe_size = 4096; // no expert of a real model begins with so many zero bytes

std::atomic<bool> has_foreign_bytes{ false }; // the tool loaded another file than our skeleton
std::atomic<bool> placement_is_good{ false }; // checked, and still right: false when expert tensors come or go

std::mutex default_mutex;
TiersList default_tiers;

TiersList tiers_to_load() {
    if (!loading_tiers.empty()) {
        return loading_tiers;
    }
    std::lock_guard<std::mutex> guard(default_mutex);
    return default_tiers;
}

void add(TiersList & list, std::shared_ptr<Tiers> tiers) {
    if (tiers) {
        list.push_back(std::move(tiers));
    } else {
        list.clear();
    }
}

ExpertBuffer * context(ggml_backend_buffer_t buffer) { return static_cast<ExpertBuffer *>(buffer->context); }

void free_buffer(ggml_backend_buffer_t buffer) {
    ExpertBuffer * self = context(buffer);
    for (const auto & [tensor, expert] : self->tensors) {
        expert.tiers->placement().count(expert.ref, -1);
    }
    placement_is_good = false;
    munmap(self->base, self->size);
    delete self;
}

void * get_base(ggml_backend_buffer_t buffer) { return context(buffer)->base; }

// For a tensor that comes while no model is being loaded into tiers: it belongs to a model without tiers, or to an
// adapter, whose tensors the engine places beside the weights that they change.
void refuse_tensor(const ggml_tensor * tensor) {
    const std::string reason = Placement::why_unknown(tensor);
    set_error(reason);
    if (!is_embedded()) {
        fprintf(stderr, "expertier: %s\n", reason.c_str());
    }
}

ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    ExpertBuffer * self = context(buffer);
    if (tensor->view_src != nullptr) {
        return GGML_STATUS_SUCCESS;
    }
    if (!self->tiers) {
        refuse_tensor(tensor);
        return GGML_STATUS_FAILED;
    }
    ExpertTensor expert{ self->tiers, {} };
    if (!self->tiers->placement().find(tensor, expert.ref)) { // find() has said why
        return GGML_STATUS_FAILED;
    }
    if (self->tensors.emplace(tensor, expert).second) {
        self->readable.add(tensor, *self->tiers, expert.ref);
        self->tiers->placement().count(expert.ref, 1);
    }
    placement_is_good = false;
    return GGML_STATUS_SUCCESS;
}

// The model's file is the source of truth: what the loader writes is dropped, and the engine reads back the file's
// bytes.
void memset_tensor(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {}
void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor *, const void * data, size_t, size_t size) {
    const char * bytes = static_cast<const char *>(data);
    if (loads_skeleton() && std::any_of(bytes, bytes + std::min(size, probe_size), [](char c) { return c != 0; })) {
        has_foreign_bytes = true;
        placement_is_good = false;
    }
    context(buffer)->tiers->counters.dropped_writes += (int64_t) size;
}
// ggml's Meta backend writes with this call when each row's shard is a part of the row.
void set_tensor_2d(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size,
                   size_t n_copies, size_t, size_t) {
    set_tensor(buffer, tensor, data, offset, size);
    context(buffer)->tiers->counters.dropped_writes += (int64_t) ((n_copies - 1) * size);
}
void get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    context(buffer)->readable.read(tensor, data, offset, size);
}
void get_tensor_2d(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t size,
                   size_t n_copies, size_t stride_tensor, size_t stride_data) {
    context(buffer)->readable.read(tensor, data, offset, size, n_copies, stride_tensor, stride_data);
}
void clear(ggml_backend_buffer_t, uint8_t) {}

const char * get_name(ggml_backend_buffer_type_t type) { return static_cast<const char *>(type->context); }

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    std::shared_ptr<Tiers> tiers;
    for (const std::shared_ptr<Tiers> & each : tiers_to_load()) {
        if (each->buffer_type() == type) {
            tiers = each;
        }
    }
    const size_t reserved = size > 0 ? size : 1;
    void * base = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        set_error("no address space for " + std::to_string(size) + " bytes of expert tensors");
        return nullptr;
    }
    auto * self = new ExpertBuffer{ tiers, base, reserved, {}, {} }; // `tiers` may be null: init_tensor() then refuses

    ggml_backend_buffer_i iface = {};
    iface.free_buffer = free_buffer;
    iface.get_base = get_base;
    iface.init_tensor = init_tensor;
    iface.memset_tensor = memset_tensor;
    iface.set_tensor = set_tensor;
    iface.set_tensor_2d = set_tensor_2d;
    iface.get_tensor = get_tensor;
    iface.get_tensor_2d = get_tensor_2d;
    iface.clear = clear;
    return ggml_backend_buffer_init(type, iface, self, size);
}

size_t get_alignment(ggml_backend_buffer_type_t) { return 64; }

std::string placed_outside(const std::string & name) {
    return "tensor " + name +
           " was placed outside of the tiers, where its bytes are not: take cpu-moe, n-cpu-moe and "
           "override-tensor out of llama.cpp's configuration file (config.ini)";
}

// The name of an expert matrix of ours that `graph` uses from another buffer, though it uses further matrices from
// ours; empty where there is none. A graph that uses nothing from our buffers belongs to another model, such as a draft
// model, whose tensors may have the same names.
std::string find_outside(const ggml_cgraph * graph) {
    std::vector<const ggml_tensor *> others;
    std::shared_ptr<Tiers> tiers;
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        if (node->op != GGML_OP_MUL_MAT_ID) {
            continue;
        }
        if (const ExpertTensor * expert = find_expert_tensor(node->src[0])) {
            tiers = expert->tiers;
        } else {
            others.push_back(node->src[0]);
        }
    }
    for (const ggml_tensor * tensor : others) {
        if (tiers && tiers->placement().has_matrix(tensor->name)) {
            return tensor->name;
        }
    }
    return {};
}

bool is_host(ggml_backend_buffer_type_t) { return false; } // the loader and the CPU backend would access host memory

} // namespace

void init_expert_buffer_type(ggml_backend_buffer_type_t type, ggml_backend_dev_t device, const char * name) {
    type->iface = {};
    type->iface.get_name = get_name;
    type->iface.alloc_buffer = alloc_buffer;
    type->iface.get_alignment = get_alignment;
    type->iface.is_host = is_host;
    type->device = device;
    type->context = const_cast<char *>(name);
}

bool is_expert_buffer_type(ggml_backend_buffer_type_t type) {
    return type != nullptr && type->iface.alloc_buffer == alloc_buffer;
}

void add_loading_tiers(std::shared_ptr<Tiers> tiers) { add(loading_tiers, std::move(tiers)); }

void add_default_tiers(std::shared_ptr<Tiers> tiers) {
    std::lock_guard<std::mutex> guard(default_mutex);
    add(default_tiers, std::move(tiers));
}

std::string find_misplacement(const ggml_cgraph * graph) {
    if (!is_embedded()) {
        return {};
    }
    const std::string outside = find_outside(graph);
    if (!outside.empty()) {
        return placed_outside(outside);
    }
    if (placement_is_good) {
        return {};
    }
    const TiersList list = tiers_to_load();
    if (list.empty()) {
        return {};
    }
    if (has_foreign_bytes) {
        return "the tool loaded another model than the one that expertier exec was given, into the latter's tiers; "
               "name one model, with -m, and none in llama.cpp's configuration file (config.ini)";
    }
    for (const std::shared_ptr<Tiers> & tiers : list) {
        const std::string unplaced = tiers->placement().find_unplaced();
        if (!unplaced.empty()) {
            return placed_outside(unplaced);
        }
    }
    placement_is_good = true;
    return {};
}

const ExpertTensor * find_expert_tensor(const ggml_tensor * tensor) {
    if (tensor == nullptr || tensor->buffer == nullptr || !is_expert_buffer_type(tensor->buffer->buft)) {
        return nullptr;
    }
    const ExpertBuffer * self = context(tensor->buffer); // null where the engine only measures, with empty buffers
    if (self == nullptr) {
        return nullptr;
    }
    const auto found = self->tensors.find(tensor);
    return found == self->tensors.end() ? nullptr : &found->second;
}

bool is_expert_memory(const ggml_tensor * tensor) {
    const ggml_tensor * base = tensor->view_src ? tensor->view_src : tensor;
    return base->buffer != nullptr && is_expert_buffer_type(base->buffer->buft);
}

const ggml_tensor * find_unserved_source(const ggml_tensor * op) {
    for (int i = 0; i < GGML_MAX_SRC && !ggml_op_is_empty(op->op); i++) {
        const ggml_tensor * source = op->src[i];
        if (source == nullptr) {
            continue;
        }
        const ggml_tensor * base = source->view_src ? source->view_src : source;
        const bool served = i == 0 && op->op == GGML_OP_MUL_MAT_ID && source == base;
        if (!served && is_expert_memory(source)) {
            return source;
        }
    }
    return nullptr;
}

} // namespace expertier
