// What Python has a pointer to while tiers are bound to a proxy device.
#pragma once

#include "slab/compute_region.h"
#include "backend/device.h"
#include "residency/tiers.h"

#include <memory>

struct expertier_tiers {
    std::shared_ptr<expertier::Tiers> tiers;
    expertier::ProxyDevice * device;
    std::shared_ptr<expertier::ComputeRegion> region = nullptr; // null: expertier_tiers_open_compute was not called
};
