// Asks the engine how it splits tensors among devices. Its rule depends on the architecture, on the kinds of the layers
// before and on the types of other tensors, so that only the engine's own function can tell.

#include "ggml-backend.h"
#include "llama_host/abi.h"
#include "llama_host/guard.h"
#include "llama_host/model.h"
#include "abi/split_abi.h"

#include <algorithm>
#include <memory>

// Declared as in the engine's own llama-model.h, because llama.h does not have it. It is null in builds that hide it.
__attribute__((weak, visibility("default"))) ggml_backend_meta_split_state
llama_meta_device_get_split_state(const ggml_tensor * tensor, void * userdata);

// llama_model::get_tensor(const char *) const, declared by its symbol because llama.h only names the class; also null
// in builds that hide it. Other functions that list tensors return strings of the C++ library, whose layout depends on
// how the engine was compiled.
extern "C" __attribute__((weak, visibility("default"))) const ggml_tensor *
find_model_tensor(const llama_model * self, const char * name) __asm__("_ZNK11llama_model10get_tensorEPKc");

namespace {

struct SplitRequest { // has the layout of llama_meta_device_get_split_state_userdata
    size_t n_devices;
    const llama_model * model;
};

} // namespace

// Fills `out` for each of `tensors` and returns 1. Returns 0 when this build of the engine does not tell, and -1 when
// memory ran out.
EXPERTIER_EXPORT int32_t expertier_model_splits(const expertier_model * self, int32_t n_devices,
                                                const expertier_full_tensor * tensors, int32_t n_tensors,
                                                expertier_split * out) {
    if (llama_meta_device_get_split_state == nullptr || find_model_tensor == nullptr ||
        n_devices > EXPERTIER_MAX_SPLIT_DEVICES) {
        return 0;
    }
    return expertier::guarded(-1, [&] {
        std::unique_ptr<ggml_context, decltype(&ggml_free)> scope(
            ggml_init({ (n_tensors + 1) * ggml_tensor_overhead(), nullptr, true }), &ggml_free);
        SplitRequest request{ (size_t) n_devices, self->model };
        for (int32_t i = 0; i < n_tensors; i++) {
            out[i] = {};
            if (find_model_tensor(self->model, tensors[i].name) ==
                nullptr) { // for a tensor that it has not loaded, the engine's function would end the process
                out[i].axis = EXPERTIER_NOT_LOADED;
                continue;
            }
            ggml_tensor * tensor = ggml_new_tensor(scope.get(), (ggml_type) tensors[i].type, 4, tensors[i].ne);
            ggml_set_name(tensor, tensors[i].name);
            const ggml_backend_meta_split_state state = llama_meta_device_get_split_state(tensor, &request);
            if (state.n_segments > EXPERTIER_MAX_SEGMENTS) {
                return 0;
            }
            out[i].axis = state.axis;
            out[i].n_segments = (int32_t) state.n_segments;
            std::copy_n(state.nr, state.n_segments, out[i].repeats);
            std::copy_n(state.ne, state.n_segments * n_devices, out[i].ne);
        }
        return 1;
    });
}
