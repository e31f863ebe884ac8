#include "lookup/open_lookup.h"

#include "lookup/device_lookup.h"
#include "prefetch/predictor.h"
#include "prefetch/run.h"

#include <memory>
#include <stdexcept>
#include <vector>

namespace expertier {

std::string open_device_lookup(Tiers & tiers, const expertier_device_lookup & driver, ggml_backend_dev_t device) {
    if (tiers.sees_all()) {
        throw std::runtime_error("every look-up is being recorded, and that is done on the host");
    }
    std::vector<int> n_experts;
    for (int layer = 0; layer < tiers.slots().n_layers(); layer++) {
        n_experts.push_back(tiers.slots().n_experts(layer));
    }
    const auto lookup = std::make_shared<DeviceLookup>(driver, device, n_experts);
    tiers.look_up_with(lookup);
    std::string without;
    if (const std::string problem = lookup->try_capture(device); !problem.empty()) {
        without += "capture\t" + problem + "\n";
    }
    if (driver.predict == nullptr || driver.layers_ahead <= 0) {
        return without;
    }
    try {
        const auto events = std::make_shared<PieceEvents>(device);
        tiers.predict_with(std::make_shared<Predictor>(*lookup, device, n_experts), events);
    } catch (const std::runtime_error & problem) { // look-ups work without predictions
        without += std::string("prefetch\t") + problem.what() + "\n";
    }
    return without;
}

} // namespace expertier
