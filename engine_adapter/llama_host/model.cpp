// Opens models and turns text into tokens and back.

#include "llama_host/model.h"

#include "llama_host/abi.h"
#include "llama_host/guard.h"
#include "llama_host/log.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

using namespace expertier;

namespace {

// Copies the end of `text`, because the last lines of the engine's log say what went wrong.
void copy_text(const std::string & text, char * out, size_t size) {
    if (out && size) {
        const size_t skipped = text.size() < size ? 0 : text.size() - size + 1;
        snprintf(out, size, "%s", text.c_str() + skipped);
    }
}

// Switches lazy loading off in releases that have it: by default it would map marked tensors, in spite of load_mode.
template <typename P> auto never_lazy(P & params, int) -> decltype(params.lazy_mode, void()) {
    params.lazy_mode = LLAMA_LAZY_MODE_OFF;
}
template <typename P> void never_lazy(P &, long) {}

// The engine's own GPUs, null-terminated; an empty list means the CPU. Loads without tiers name them, because the
// engine would place layers on the proxy devices as well once these are registered.
std::vector<ggml_backend_dev_t> stock_devices() {
    std::vector<ggml_backend_dev_t> devices, integrated; // as in the engine, integrated GPUs only where no other GPU is
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
        devices = std::move(integrated);
    }
    devices.push_back(nullptr);
    return devices;
}

// Puts the devices of these names, which are separated by commas, into `devices`, null-terminated. The CPU is left out.
// False where no device has such a name.
bool name_devices(const std::string & names, std::vector<ggml_backend_dev_t> & devices, std::string & error) {
    devices.clear();
    for (size_t begin = 0; begin <= names.size();) {
        const size_t end = std::min(names.find(',', begin), names.size());
        const std::string name = names.substr(begin, end - begin);
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
        begin = end + 1;
    }
    devices.push_back(nullptr);
    return true;
}

constexpr const char * all_experts_regex = "\\.ffn_(up|down|gate|gate_up)_(ch|)exps"; // what -cmoe keeps on the CPU

// Places all layers on `devices`, or on the CPU where there are none. Several devices share the layers as `split` says,
// or as the engine chooses where `split` is empty.
void place_on(std::vector<ggml_backend_dev_t> & devices, std::vector<float> & split, llama_model_params & params) {
    split.resize(split.empty() ? 0 : llama_max_devices(), 0.0f); // the engine reads so many numbers
    params.n_gpu_layers = 9999;
    params.devices = devices.data();
    params.tensor_split = split.empty() ? nullptr : split.data();
    params.main_gpu = devices.front() ? 0 : -1; // the engine refuses 0 where there is no GPU
    params.split_mode = devices.size() > 2 ? LLAMA_SPLIT_MODE_LAYER : LLAMA_SPLIT_MODE_NONE;
}

// A line for each block that the engine's log says it has put on another device than it was told; empty where there is
// no such block.
std::string find_displaced(const expertier_model_options & options) {
    std::string displaced;
    for (const auto & [block, found] : take_block_devices()) {
        int32_t end = 0, i = 0;
        while (i < options.n_placed && block >= (end += options.placed[i].units)) {
            i++;
        }
        const char * wanted = i < options.n_placed
                                  ? ggml_backend_dev_name(static_cast<ggml_backend_dev_t>(options.placed[i].device))
                                  : "";
        if (options.n_placed > 1 && !options.splits_tensors && found != wanted) {
            displaced += "layer " + std::to_string(block) + " is on " + found + " and should be on " + wanted + "\n";
        }
    }
    return displaced;
}

// The engine's progress callback, which it calls between two tensors. Our caller may end the load, and so may the
// callback in the parameters that the load started from.
struct LoadProgress {
    int32_t (*goes_on)(void);
    llama_progress_callback theirs;
    void * their_data;

    static bool ask(float progress, void * self) {
        const auto & asked = *static_cast<const LoadProgress *>(self);
        return (!asked.goes_on || asked.goes_on()) && (!asked.theirs || asked.theirs(progress, asked.their_data));
    }
};

std::unique_ptr<expertier_model> open_model(const expertier_model_options & options, std::string & error) {
    auto self = std::make_unique<expertier_model>();
    llama_model_params params = llama_model_default_params();
    if (options.params) {
        if (options.params_bytes != sizeof(params)) {
            error = "the given llama_model_params have " + std::to_string(options.params_bytes) +
                    " bytes, but the engine's have " + std::to_string(sizeof(params)) +
                    "; use bindings of the release that this llama.cpp was built from";
            return nullptr;
        }
        params = *static_cast<const llama_model_params *>(options.params);
    }
    params.use_extra_bufts = options.repack != 0;
    LoadProgress progress{ options.goes_on, params.progress_callback, params.progress_callback_user_data };
    if (options.goes_on) {
        params.progress_callback = LoadProgress::ask;
        params.progress_callback_user_data = &progress;
    }

    std::vector<ggml_backend_dev_t> devices;
    std::vector<float> split;
    std::vector<llama_model_tensor_buft_override> overrides;
    if (options.n_placed > 0) {
        for (int32_t i = 0; i < options.n_placed; i++) {
            const expertier_placed & placed = options.placed[i];
            devices.push_back(static_cast<ggml_backend_dev_t>(placed.device));
            split.push_back((float) placed.units);
            overrides.push_back({ placed.experts_regex, static_cast<ggml_backend_buffer_type_t>(placed.experts_type) });
        }
        devices.push_back(nullptr);
        overrides.push_back({ nullptr, nullptr });
        place_on(devices, split, params);
    } else if (options.device_names) {
        if (!name_devices(options.device_names, devices, error)) {
            return nullptr;
        }
        place_on(devices, split, params);
    } else if (ggml_backend_reg_by_name("expertier")) {
        devices = stock_devices();
        params.devices = devices.data();
    }
    if (options.splits_tensors) {
        const size_t n = devices.empty() ? 0 : devices.size() - 1;
        if (options.tensor_split) {
            self->tensor_split.assign(options.tensor_split, options.tensor_split + n);
            self->tensor_split.resize(llama_max_devices(), 0.0f);
        }
        params.tensor_split = options.tensor_split ? self->tensor_split.data() : nullptr;
        params.split_mode = LLAMA_SPLIT_MODE_TENSOR;
    }

    if (options.n_placed > 0) {
        params.tensor_buft_overrides = overrides.data();
        params.load_mode = LLAMA_LOAD_MODE_NONE; // with a mapping, the engine would read or pin the experts as well
        never_lazy(params, 0);
        if (!self->files.open(options, error)) {
            return nullptr;
        }
        FILE * stream = self->files.stream();
        if (stream == nullptr) {
            error = std::string(options.path) + ": " + strerror(errno);
            return nullptr;
        }
        take_block_devices();
        self->model = llama_model_load_from_file_ptr(stream, params);
        fclose(stream);
        const std::string displaced = find_displaced(options);
        if (self->model != nullptr && !displaced.empty()) {
            llama_model_free(self->model);
            error = "llama.cpp has put layers on other devices than it was told:\n" + displaced;
            return nullptr;
        }
    } else {
        if (options.experts_in_ram) {
            ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
            overrides = { { all_experts_regex, ggml_backend_dev_buffer_type(cpu) }, { nullptr, nullptr } };
            params.tensor_buft_overrides = overrides.data();
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

// Opens a model. Returns null and fills `error` when the engine refuses it.
EXPERTIER_EXPORT expertier_model * expertier_model_open(const expertier_model_options * options, char * error,
                                                        size_t error_size) {
    if (options->abi != EXPERTIER_HOST_ABI) {
        copy_text("the host library speaks another interface; run `expertier engine build`", error, error_size);
        return nullptr;
    }
    return guarded<expertier_model *>(nullptr, [&] {
        std::string reason = "out of memory";
        auto model = open_model(*options, reason);
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

// Returns the engine's own model, which the caller owns from now on and must free before it closes `self`.
EXPERTIER_EXPORT llama_model * expertier_model_hand_over(expertier_model * self) {
    self->owns_model = false;
    return self->model;
}

// For loads by other code: a null-terminated list of devices without the proxy devices; null while no proxy is
// registered, so that the engine can choose by itself.
EXPERTIER_EXPORT void * expertier_host_stock_devices(void) {
    if (!ggml_backend_reg_by_name("expertier")) {
        return nullptr;
    }
    static std::vector<ggml_backend_dev_t> devices = stock_devices();
    return devices.data();
}

EXPERTIER_EXPORT void expertier_model_load_counts(const expertier_model * self, expertier_load_counts * out) {
    out->bytes_read = self->files.bytes_read();
    out->expert_bytes = self->files.expert_bytes();
}

EXPERTIER_EXPORT int32_t expertier_model_n_vocab(const expertier_model * self) {
    return llama_vocab_n_tokens(llama_model_get_vocab(self->model));
}

EXPERTIER_EXPORT int32_t expertier_model_n_ctx_train(const expertier_model * self) {
    return llama_model_n_ctx_train(self->model);
}

constexpr int32_t text_error = INT32_MIN; // from tokenize and piece: the engine threw, or there is no such token

// Writes the tokens of `text`. Returns how many there are, or minus that number when `max` is too small.
EXPERTIER_EXPORT int32_t expertier_model_tokenize(const expertier_model * self, const char * text, int32_t length,
                                                  int32_t * tokens, int32_t max) {
    return guarded(text_error, [&] {
        return llama_tokenize(llama_model_get_vocab(self->model), text, length, tokens, max, true, true);
    });
}

// Writes the text of `token`. Returns how many bytes it has, or minus that number when `size` is too small.
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
