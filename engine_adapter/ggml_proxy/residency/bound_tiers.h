// What Python holds of tiers that are bound to a proxy device.
#pragma once

#include "slab/compute_region.h"
#include "backend/device.h"
#include "residency/tiers.h"

#include <memory>

struct expertier_tiers {
    std::shared_ptr<expertier::Tiers> tiers;
    expertier::ProxyDevice * device;
    std::shared_ptr<expertier::ComputeRegion> region = nullptr; // null: the engine computes elsewhere
};
