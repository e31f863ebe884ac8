// The entry that ggml finds by dlsym: one registry with a compute and a naming device for each real device.

#include "abi/abi.h"
#include "backend/backend.h"
#include "backend/communicator.h"
#include "backend/device.h"
#include "abi/embedded.h"

#include <cstring>

namespace expertier {

namespace {

const char * get_name(ggml_backend_reg_t) { return "expertier"; }

size_t get_device_count(ggml_backend_reg_t) { return 2 * proxies().size(); }

ggml_backend_dev_t get_device(ggml_backend_reg_t, size_t index) {
    ProxyDevice * proxy = proxies().at(index / 2);
    return index % 2 == 0 ? &proxy->compute : &proxy->naming;
}

void * get_proc_address(ggml_backend_reg_t, const char * name) {
    if (strcmp(name, "ggml_backend_set_n_threads") == 0) {
        return reinterpret_cast<void *>(set_n_threads);
    }
    if (strcmp(name, "ggml_backend_set_abort_callback") == 0) {
        return reinterpret_cast<void *>(set_abort_callback);
    }
    if (strcmp(name, "ggml_backend_comm_init") == 0) {
        return reinterpret_cast<void *>(comm_init);
    }
    if (strcmp(name, "ggml_backend_comm_free") == 0) {
        return reinterpret_cast<void *>(comm_free);
    }
    if (strcmp(name, "ggml_backend_comm_allreduce_tensor") == 0) {
        return reinterpret_cast<void *>(comm_allreduce);
    }
    return nullptr;
}

ggml_backend_reg registry = { GGML_BACKEND_API_VERSION,
                              { get_name, get_device_count, get_device, get_proc_address },
                              nullptr };

} // namespace

} // namespace expertier

EXPERTIER_EXPORT ggml_backend_reg_t ggml_backend_init(void) {
    using namespace expertier;
    if (proxies().empty()) {
        make_proxies(&registry);
    }
    return start_embedded_tiers() ? &registry : nullptr;
}
