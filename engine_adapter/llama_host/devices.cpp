// The devices that the engine knows, as JSON.

#include "ggml-backend.h"
#include "llama_host/abi.h"

#include <string>

EXPERTIER_EXPORT const char * expertier_host_devices(void) {
    static std::string text;
    text = "[";
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        size_t free = 0, total = 0;
        ggml_backend_dev_memory(device, &free, &total);
        text += text.size() > 1 ? ", " : "";
        text += std::string("{\"name\": \"") + ggml_backend_dev_name(device) + "\", \"description\": \"" +
                ggml_backend_dev_description(device) + "\", \"free_bytes\": " + std::to_string(free) +
                ", \"total_bytes\": " + std::to_string(total) + "}";
    }
    text += ']';
    return text.c_str();
}
