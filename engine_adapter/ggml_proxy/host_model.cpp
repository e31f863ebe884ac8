// Opens models and turns text into tokens and back.

#include "host_model.h"

#include "host_abi.h"
#include "host_guard.h"
#include "host_log.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

using namespace expertier;

namespace {

// Copies the end of `text`: the last lines are the ones that tell.
void copy_text(const std::string & text, char * out, size_t size) {
    if (out && size) {
        const size_t skipped = text.size() < size ? 0 : text.size() - size + 1;
        snprintf(out, size, "%s", text.c_str() + skipped);
    }
}

// Not every release has the field; where it does, its default would map marked tensors after all.
template <typename P> auto never_lazy(P & params, int) -> decltype(params.lazy_mode, void()) {
    params.lazy_mode = LLAMA_LAZY_MODE_OFF;
}
template <typename P> void never_lazy(P &, long) {}

// Stock placement must not land on our own devices: once the proxy is registered, the engine's other GPU devices are
// named one by one (null-terminated; an empty list means the CPU). Before, the engine chooses by itself.
std::vector<ggml_backend_dev_t> stock_devices() {
    std::vector<ggml_backend_dev_t> devices, integrated; // like the engine, integrated ones only where no other is
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        if (std::string(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device))) == "expertier") {
            continue;
        }
        switch (ggml_backend_dev_type(device)) {
            case GGML_BACKEND_DEVICE_TYPE_GPU:
                devices.push_back(device);
                break;
            case GGML_BACKEND_DEVICE_TYPE_IGPU:
                integrated.push_back(device);
                break;
            default:
                break;
        }
    }
    if (devices.empty()) {
        devices = integrated;
    }
    devices.push_back(nullptr);
    return devices;
}

// Puts the device of that name into `devices`, null-terminated; of the CPU, just the null. False where there is none.
bool name_device(const std::string & name, std::vector<ggml_backend_dev_t> & devices, std::string & error) {
    devices.clear();
    ggml_backend_dev_t device = ggml_backend_dev_by_name(name.c_str());
    if (device == nullptr) {
        error = "there is no device " + name + ", only";
        for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
            error += std::string(" ") + ggml_backend_dev_name(ggml_backend_dev_get(i));
        }
        return false;
    }
    if (ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU) {
        devices.push_back(device);
    }
    devices.push_back(nullptr);
    return true;
}

constexpr const char * all_experts_regex = "\\.ffn_(up|down|gate|gate_up)_(ch|)exps"; // what -cmoe keeps on the CPU

// Places all layers on the one device of `devices`, or on the CPU where that is empty.
void place_on(std::vector<ggml_backend_dev_t> & devices, llama_model_params & params) {
    params.n_gpu_layers = 9999;
    params.devices      = devices.data();
    params.tensor_split = nullptr;
    params.main_gpu     = devices.front() ? 0 : -1; // 0 is refused where there is none
    params.split_mode   = LLAMA_SPLIT_MODE_NONE;
}

std::unique_ptr<expertier_model> open_model(const expertier_model_options & options, std::string & error) {
    auto               self   = std::make_unique<expertier_model>();
    llama_model_params params = llama_model_default_params();
    if (options.params) {
        if (options.params_bytes != sizeof(params)) {
            error = "model parameters of " + std::to_string(options.params_bytes) + " bytes, the engine's have " +
                    std::to_string(sizeof(params));
            return nullptr;
        }
        params = *static_cast<const llama_model_params *>(options.params);
    }
    params.use_extra_bufts = options.repack != 0;

    std::vector<ggml_backend_dev_t>  devices     = { static_cast<ggml_backend_dev_t>(options.device), nullptr };
    llama_model_tensor_buft_override overrides[] = {
        { options.experts_regex, static_cast<ggml_backend_buffer_type_t>(options.experts_type) },
        { nullptr, nullptr },
    };
    if (options.split_devices) {
        devices.assign(reinterpret_cast<const ggml_backend_dev_t *>(options.split_devices),
                       reinterpret_cast<const ggml_backend_dev_t *>(options.split_devices) + options.n_split_devices);
        devices.push_back(nullptr);
        place_on(devices, params);
        params.split_mode = LLAMA_SPLIT_MODE_TENSOR;
        if (options.tensor_split) {
            self->tensor_split.assign(options.tensor_split, options.tensor_split + options.n_split_devices);
            self->tensor_split.resize(std::max(self->tensor_split.size(), llama_max_devices()));
            params.tensor_split = self->tensor_split.data();
        }
    } else if (options.device) {
        place_on(devices, params);
    } else if (options.device_name) {
        if (!name_device(options.device_name, devices, error)) {
            return nullptr;
        }
        place_on(devices, params);
    } else if (ggml_backend_reg_by_name("expertier")) {
        devices        = stock_devices();
        params.devices = devices.data();
    }

    if (options.experts_type) {
        params.tensor_buft_overrides = overrides;
        params.load_mode             = LLAMA_LOAD_MODE_NONE; // a mapping would read, or pin, the experts after all
        never_lazy(params, 0);
        if (!self->files.open(options, error)) {
            return nullptr;
        }
        FILE * stream = self->files.stream();
        if (stream == nullptr) {
            error = std::string(options.path) + ": " + strerror(errno);
            return nullptr;
        }
        self->model = llama_model_load_from_file_ptr(stream, params);
        fclose(stream);
    } else {
        if (options.experts_in_ram) {
            ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
            overrides[0]           = { all_experts_regex, ggml_backend_dev_buffer_type(cpu) };
            params.tensor_buft_overrides = overrides;
        }
        params.no_alloc = options.is_measured != 0;
        if (!options.is_mapped || options.is_measured) {
            params.load_mode = LLAMA_LOAD_MODE_NONE;
        }
        self->model = llama_model_load_from_file(options.path, params);
    }
    if (self->model == nullptr) {
        error = take_engine_log(GGML_LOG_LEVEL_WARN);
        return nullptr;
    }
    return self;
}

} // namespace

EXPERTIER_EXPORT int32_t expertier_host_abi(void) { return EXPERTIER_HOST_ABI; }

EXPERTIER_EXPORT void expertier_host_start(void) {
    keep_engine_log();
    llama_backend_init();
}

EXPERTIER_EXPORT int64_t expertier_host_take_log(int32_t level, char * out, size_t size) {
    const std::string text = take_engine_log(level);
    copy_text(text, out, size);
    return (int64_t) text.size();
}

// Null and `error` filled when the engine refuses the model.
EXPERTIER_EXPORT expertier_model * expertier_model_open(const expertier_model_options * options, char * error,
                                                        size_t error_size) {
    if (options->abi != EXPERTIER_HOST_ABI) {
        copy_text("the host library speaks another interface; run `expertier engine build`", error, error_size);
        return nullptr;
    }
    return guarded<expertier_model *>(nullptr, [&] {
        std::string reason = "out of memory";
        auto        model  = open_model(*options, reason);
        copy_text(reason, error, error_size);
        return model.release();
    });
}

EXPERTIER_EXPORT void expertier_model_close(expertier_model * self) {
    if (self->owns_model) {
        llama_model_free(self->model);
    }
    delete self;
}

// The engine's own model, which the caller has to free from now on, before it closes `self`.
EXPERTIER_EXPORT llama_model * expertier_model_hand_over(expertier_model * self) {
    self->owns_model = false;
    return self->model;
}

// For loads that are not ours: the null-terminated list of devices that keeps them off ours; null while the engine
// has none of ours, and chooses by itself.
EXPERTIER_EXPORT void * expertier_host_stock_devices(void) {
    if (!ggml_backend_reg_by_name("expertier")) {
        return nullptr;
    }
    static std::vector<ggml_backend_dev_t> devices = stock_devices();
    return devices.data();
}

EXPERTIER_EXPORT void expertier_model_load_counts(const expertier_model * self, expertier_load_counts * out) {
    out->bytes_read   = self->files.bytes_read();
    out->expert_bytes = self->files.expert_bytes();
}

EXPERTIER_EXPORT int32_t expertier_model_n_vocab(const expertier_model * self) {
    return llama_vocab_n_tokens(llama_model_get_vocab(self->model));
}

EXPERTIER_EXPORT int32_t expertier_model_n_ctx_train(const expertier_model * self) {
    return llama_model_n_ctx_train(self->model);
}

constexpr int32_t text_error = INT32_MIN; // tokenize and piece: the engine threw, or there is no such token

// Number of tokens, or minus the number needed when `max` is too small.
EXPERTIER_EXPORT int32_t expertier_model_tokenize(const expertier_model * self, const char * text, int32_t length,
                                                  int32_t * tokens, int32_t max) {
    return guarded(text_error, [&] {
        return llama_tokenize(llama_model_get_vocab(self->model), text, length, tokens, max, true, true);
    });
}

// Number of bytes, or minus the number needed when `size` is too small.
EXPERTIER_EXPORT int32_t expertier_model_piece(const expertier_model * self, int32_t token, char * out, int32_t size) {
    if (token < 0 || token >= expertier_model_n_vocab(self)) {
        return text_error;
    }
    return guarded(text_error, [&] {
        return llama_token_to_piece(llama_model_get_vocab(self->model), token, out, size, 0, false);
    });
}

EXPERTIER_EXPORT int32_t expertier_model_is_end(const expertier_model * self, int32_t token) {
    return token >= 0 && token < expertier_model_n_vocab(self) &&
           llama_vocab_is_eog(llama_model_get_vocab(self->model), token);
}
