// Opens look-ups on the device for bound tiers, and the predictions that go with them.
#pragma once

#include "abi/abi.h"
#include "ggml-backend.h"
#include "residency/tiers.h"

#include <string>

namespace expertier {

// Returns a line for each part that was asked for and does not work: its name, a tab, and the reason; empty when all
// parts work. Throws std::runtime_error when the look-up itself does not work.
std::string open_device_lookup(Tiers & tiers, const expertier_device_lookup & driver, ggml_backend_dev_t device);

} // namespace expertier
