// The functions that Python calls: bind a model's tiers to a proxy device, load under them, read counters and errors.

#include "abi/abi.h"
#include "abi/block_size.h"
#include "abi/bound_tiers.h"
#include "slab/compute_buffer.h"
#include "slab/compute_region.h"
#include "backend/device.h"
#include "backend/expert_buffer.h"
#include "graph/prefill_stream.h"
#include "lookup/open_lookup.h"
#include "prefetch/predictor.h"
#include "backend/wrapper_type.h"
#include "residency/tiers.h"
#include "residency/errors.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iterator>
#include <stdexcept>

using namespace expertier;

namespace {

void copy_text(const std::string & text, char * out, size_t size) {
    if (out && size) {
        snprintf(out, size, "%s", text.c_str());
    }
}

ProxyDevice * proxy_over(const char * inner_name) {
    for (ProxyDevice * proxy : proxies()) {
        if (strcmp(ggml_backend_dev_name(proxy->inner), inner_name) == 0) {
            return proxy;
        }
    }
    return nullptr;
}

} // namespace

EXPERTIER_EXPORT int32_t expertier_proxy_abi(void) { return EXPERTIER_ABI; }

EXPERTIER_EXPORT int32_t expertier_proxy_api_version(void) { return GGML_BACKEND_API_VERSION; }

// Does what expertier_host_block_size does, for processes that have no host library.
EXPERTIER_EXPORT int32_t expertier_proxy_block_size(int32_t type, int64_t * elements, int64_t * n_bytes) {
    return block_size(type, elements, n_bytes);
}

// Whether this release of the engine allows compute buffers in the slab: 1 or 0.
EXPERTIER_EXPORT int32_t expertier_proxy_can_wrap(void) { return can_wrap(); }

// The engine's own devices that have a proxy, in the engine's order; null after the last.
EXPERTIER_EXPORT const char * expertier_proxy_device_name(int32_t index) {
    const std::vector<ProxyDevice *> & all = proxies();
    return index >= 0 && (size_t) index < all.size() ? ggml_backend_dev_name(all[index]->inner) : nullptr;
}

// Binds tiers to the proxy over device `inner_name`. Returns null and fills `error` when that is not possible.
EXPERTIER_EXPORT expertier_tiers * expertier_tiers_bind(const expertier_binding * binding, const char * inner_name,
                                                        char * error, size_t error_size) {
    if (binding->abi != EXPERTIER_ABI) {
        copy_text("the proxy library speaks interface " + std::to_string(EXPERTIER_ABI) + ", Python speaks " +
                      std::to_string(binding->abi) + "; run `expertier engine build`",
                  error, error_size);
        return nullptr;
    }
    ProxyDevice * device = proxy_over(inner_name);
    if (device == nullptr) {
        copy_text(std::string("no proxy for device ") + inner_name, error, error_size);
        return nullptr;
    }
    try {
        const auto tiers =
            std::make_shared<Tiers>(*binding, TierDevice{ device->inner, &device->experts, device->n_backends });
        if (tiers->stream_tokens() > 0) {
            tiers->stream_through(std::make_shared<PrefillStream>(*tiers, *binding, device->inner));
        }
        return new expertier_tiers{ tiers, device };
    } catch (const std::exception & problem) {
        copy_text(problem.what(), error, error_size);
        return nullptr;
    }
}

// Has ids looked up on the device from now on. Returns 0 and fills `error` when that does not work. With a result of 1,
// `error` may still say why graphs are not captured or experts are not predicted.
EXPERTIER_EXPORT int32_t expertier_tiers_open_device_lookup(expertier_tiers * self,
                                                            const expertier_device_lookup * driver, char * error,
                                                            size_t error_size) {
    try {
        copy_text(open_device_lookup(*self->tiers, *driver, self->device->inner), error, error_size);
        return 1;
    } catch (const std::exception & problem) {
        copy_text(problem.what(), error, error_size);
        return 0;
    }
}

// From now on, gives the engine's compute buffers on this device the slab's low end where `most_bytes` is not 0, and
// has the layers' numbers of slots follow demand where `look` is not null. Returns 0 and fills `error` when that is not
// possible.
EXPERTIER_EXPORT int32_t expertier_tiers_open_compute(expertier_tiers * self, const expertier_compute * compute,
                                                      char * error, size_t error_size) {
    try {
        const bool computes = compute->most_bytes > 0;
        if (computes && !can_wrap()) {
            throw std::runtime_error(
                "this release of llama.cpp allocates weights and compute buffers by the same call");
        }
        std::shared_ptr<ComputeRegion> region = self->tiers->new_compute_region(*compute, *self->device);
        if (computes) {
            try_out(region, self->device->inner);
        }
        self->region = std::move(region);
        self->tiers->count_misses_for(self->region);
        self->device->add_region(self->region);
        return 1;
    } catch (const std::exception & problem) {
        copy_text(problem.what(), error, error_size);
        return 0;
    }
}

EXPERTIER_EXPORT void expertier_tiers_compute_counts(expertier_tiers * self, expertier_compute_counts * out) {
    *out = self->region ? self->region->counts() : expertier_compute_counts{};
}

// Takes the tiers from the device. They live on until the engine has freed the expert buffers that use them; compute
// buffers must have been freed before.
EXPERTIER_EXPORT void expertier_tiers_unbind(expertier_tiers * self) {
    if (self->region) {
        self->device->remove_region(self->region);
        self->region->close();
        self->tiers->count_misses_for(nullptr);
    }
    delete self;
}

// Between these two calls, expert tensors that loads on this thread place in the buffer type of `self` belong to
// `self`. For a model on several devices, begin_load is called for the tiers of each device, and end_load once.
EXPERTIER_EXPORT void expertier_tiers_begin_load(expertier_tiers * self) { add_loading_tiers(self->tiers); }
EXPERTIER_EXPORT void expertier_tiers_end_load(void) { add_loading_tiers(nullptr); }

// From now on, expert tensors that loads on any other thread place in the buffer type of `self` belong to `self`. Null
// ends that for all tiers.
EXPERTIER_EXPORT void expertier_tiers_set_default(expertier_tiers * self) {
    add_default_tiers(self ? self->tiers : nullptr);
}

// Writes the name of the first expert tensor that the engine should have placed here and has not. Returns 0 when there
// is none.
EXPERTIER_EXPORT int32_t expertier_tiers_unplaced(expertier_tiers * self, char * name, size_t name_size) {
    const std::string found = self->tiers->placement().find_unplaced();
    copy_text(found, name, name_size);
    return !found.empty();
}

// Until expertier_show_all(), loads that choose GPUs by themselves find only the proxies over these `n` devices, which
// are named as in expertier_tiers_bind. With `splits_tensors` that holds for loads that split tensors as well.
EXPERTIER_EXPORT void expertier_show_only(const char * const * inner_names, int32_t n, int32_t splits_tensors) {
    std::vector<const ProxyDevice *> shown;
    for (int32_t i = 0; i < n; i++) {
        if (const ProxyDevice * proxy = proxy_over(inner_names[i])) {
            shown.push_back(proxy);
        }
    }
    show_only(shown, splits_tensors != 0);
}
EXPERTIER_EXPORT void expertier_show_all(void) { show_all(); }

// Sets how misses are served from now on (expertier_fills), and returns once no fill runs that began before. To be
// called without the interpreter's lock, as such a fill may wait for that lock.
EXPERTIER_EXPORT void expertier_tiers_set_fills(expertier_tiers * self, int32_t fills) {
    self->tiers->misses().set_fills((expertier_fills) fills);
}

// Names for the engine's own options: the device to place layers on and the buffer type to place experts in.
EXPERTIER_EXPORT const char * expertier_tiers_device_name(expertier_tiers * self) { return self->device->name.c_str(); }
EXPERTIER_EXPORT const char * expertier_tiers_buffer_name(expertier_tiers * self) {
    return self->device->buffer_name.c_str();
}

// ggml objects for the host shim: the device to place layers on and the buffer type to place experts in.
EXPERTIER_EXPORT void * expertier_tiers_device(expertier_tiers * self) { return &self->device->compute; }
EXPERTIER_EXPORT void * expertier_tiers_buffer_type(expertier_tiers * self) { return &self->device->experts; }

// Copies and clears the calling thread's last error; 0 when there was none.
EXPERTIER_EXPORT int32_t expertier_take_error(char * error, size_t error_size) {
    const std::string text = take_error();
    copy_text(text, error, error_size);
    return !text.empty();
}

// Writes what was counted since the binding was made, in the order of abi/counters.h: at most `n` numbers, for which
// `out` has room. Returns how many numbers there are.
EXPERTIER_EXPORT int32_t expertier_tiers_counters(expertier_tiers * self, int64_t * out, int32_t n) {
    const Counters & counters = self->tiers->counters;
    const Predictor * predictor = self->tiers->predictor();
    const int64_t prefetch_layers = predictor ? predictor->layers_ahead() : 0;
    const int64_t values[] = {
#define EXPERTIER_COUNTER(name, meaning) counters.name,
#define EXPERTIER_GAUGE(name, meaning) name,
        EXPERTIER_COUNTERS(EXPERTIER_COUNTER) EXPERTIER_GAUGES(EXPERTIER_GAUGE)
#undef EXPERTIER_COUNTER
#undef EXPERTIER_GAUGE
    };
    std::copy_n(values, std::min<size_t>(std::size(values), std::max(n, 0)), out);
    return (int32_t) std::size(values);
}
