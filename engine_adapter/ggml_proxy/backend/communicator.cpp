#include "backend/communicator.h"

#include "backend/backend.h"

#include <vector>

namespace expertier {

namespace {

struct Communicator {
    void * inner;
    ggml_backend_comm_free_t free;
    ggml_backend_comm_allreduce_tensor_t allreduce;
};

ggml_backend_reg_t registry_of(ggml_backend_t backend) {
    return ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
}

template <typename Function> Function find(ggml_backend_reg_t registry, const char * name) {
    return reinterpret_cast<Function>(ggml_backend_reg_get_proc_address(registry, name));
}

} // namespace

void * comm_init(ggml_backend_t * backends, size_t n_backends) {
    make_group(backends, n_backends); // ggml says here, and nowhere else, which backends work together
    std::vector<ggml_backend_t> inner;
    for (size_t i = 0; i < n_backends; i++) {
        inner.push_back(unwrap(backends[i]));
        if (registry_of(inner[i]) != registry_of(inner[0])) {
            return nullptr; // devices of different vendors cannot add up together
        }
    }
    ggml_backend_reg_t registry = registry_of(inner[0]);
    const auto init = find<ggml_backend_comm_init_t>(registry, "ggml_backend_comm_init");
    void * made = init ? init(inner.data(), inner.size()) : nullptr;
    if (made == nullptr) {
        return nullptr;
    }
    return new Communicator{ made, find<ggml_backend_comm_free_t>(registry, "ggml_backend_comm_free"),
                             find<ggml_backend_comm_allreduce_tensor_t>(registry,
                                                                        "ggml_backend_comm_allreduce_tensor") };
}

void comm_free(void * communicator) {
    auto * self = static_cast<Communicator *>(communicator);
    self->free(self->inner);
    delete self;
}

bool comm_allreduce(void * communicator, ggml_tensor ** tensors) {
    auto * self = static_cast<Communicator *>(communicator);
    return self->allreduce(self->inner, tensors);
}

} // namespace expertier
