#include "expert_buffer.h"

#include "ggml-backend-impl.h"

#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <unordered_map>

namespace expertier {

namespace {

struct ExpertBuffer {
    std::shared_ptr<Tiers>                                tiers;
    void *                                                base = nullptr;
    size_t                                                size = 0;
    std::unordered_map<const ggml_tensor *, ExpertTensor> tensors;
};

thread_local std::shared_ptr<Tiers> loading_tiers;

std::mutex             default_mutex;
std::shared_ptr<Tiers> default_tiers;

std::shared_ptr<Tiers> tiers_to_load() {
    if (loading_tiers) {
        return loading_tiers;
    }
    std::lock_guard<std::mutex> guard(default_mutex);
    return default_tiers;
}

ExpertBuffer * context(ggml_backend_buffer_t buffer) { return static_cast<ExpertBuffer *>(buffer->context); }

void free_buffer(ggml_backend_buffer_t buffer) {
    ExpertBuffer * self = context(buffer);
    munmap(self->base, self->size);
    delete self;
}

void * get_base(ggml_backend_buffer_t buffer) { return context(buffer)->base; }

ggml_status init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    ExpertBuffer * self = context(buffer);
    if (tensor->view_src != nullptr) {
        return GGML_STATUS_SUCCESS;
    }
    ExpertTensor expert{ self->tiers, {} };
    if (!self->tiers->find(tensor, expert.ref)) { // find() has said why
        return GGML_STATUS_FAILED;
    }
    self->tensors[tensor] = expert;
    return GGML_STATUS_SUCCESS;
}

// The file is the source of truth: what the loader writes is dropped, and there is nothing to read back.
void memset_tensor(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {}
void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor *, const void *, size_t, size_t size) {
    context(buffer)->tiers->counters.dropped_writes += (int64_t) size;
}
void get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t, size_t size) {
    memset(data, 0, size); // the host reads the error after the batch, and fails it
    Tiers::fail(std::string("the engine read tensor ") + tensor->name +
                " back for an operation of its own, but its bytes live in the tiers");
}
void clear(ggml_backend_buffer_t, uint8_t) {}

const char * get_name(ggml_backend_buffer_type_t type) { return static_cast<const char *>(type->context); }

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    const std::shared_ptr<Tiers> tiers = tiers_to_load();
    if (!tiers) {
        fprintf(stderr, "expertier: experts were placed in %s, but no tiers are bound to this load; "
                        "open the model through expertier\n", get_name(type));
        return nullptr;
    }
    const size_t reserved = size > 0 ? size : 1;
    void * base = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        Tiers::fail("no address space for " + std::to_string(size) + " bytes of expert tensors");
        return nullptr;
    }
    auto * self = new ExpertBuffer{ tiers, base, reserved, {} };

    ggml_backend_buffer_i iface = {};
    iface.free_buffer           = free_buffer;
    iface.get_base              = get_base;
    iface.init_tensor           = init_tensor;
    iface.memset_tensor         = memset_tensor;
    iface.set_tensor            = set_tensor;
    iface.get_tensor            = get_tensor;
    iface.clear                 = clear;
    return ggml_backend_buffer_init(type, iface, self, size);
}

size_t get_alignment(ggml_backend_buffer_type_t) { return 64; }

bool is_host(ggml_backend_buffer_type_t) { return false; } // else the loader and the CPU backend would touch it

} // namespace

void init_expert_buffer_type(ggml_backend_buffer_type_t type, ggml_backend_dev_t device, const char * name) {
    type->iface               = {};
    type->iface.get_name      = get_name;
    type->iface.alloc_buffer  = alloc_buffer;
    type->iface.get_alignment = get_alignment;
    type->iface.is_host       = is_host;
    type->device              = device;
    type->context             = const_cast<char *>(name);
}

bool is_expert_buffer_type(ggml_backend_buffer_type_t type) {
    return type != nullptr && type->iface.alloc_buffer == alloc_buffer;
}

void set_loading_tiers(std::shared_ptr<Tiers> tiers) { loading_tiers = std::move(tiers); }

void set_default_tiers(std::shared_ptr<Tiers> tiers) {
    std::lock_guard<std::mutex> guard(default_mutex);
    default_tiers = std::move(tiers);
}

const ExpertTensor * find_expert_tensor(const ggml_tensor * tensor) {
    if (tensor == nullptr || tensor->buffer == nullptr || !is_expert_buffer_type(tensor->buffer->buft)) {
        return nullptr;
    }
    const ExpertBuffer * self = context(tensor->buffer); // null in the empty buffers that only measure
    if (self == nullptr) {
        return nullptr;
    }
    const auto found = self->tensors.find(tensor);
    return found == self->tensors.end() ? nullptr : &found->second;
}

bool is_view_op(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_NONE:
        case GGML_OP_VIEW:
        case GGML_OP_RESHAPE:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
            return true;
        default:
            return false;
    }
}

const ggml_tensor * find_unserved_source(const ggml_tensor * op) {
    for (int i = 0; i < GGML_MAX_SRC && !is_view_op(op); i++) {
        const ggml_tensor * source = op->src[i];
        if (source == nullptr) {
            continue;
        }
        const ggml_tensor * whole  = source->view_src ? source->view_src : source;
        const bool          served = i == 0 && op->op == GGML_OP_MUL_MAT_ID && source == whole;
        if (!served && whole->buffer && is_expert_buffer_type(whole->buffer->buft)) {
            return source;
        }
    }
    return nullptr;
}

} // namespace expertier
