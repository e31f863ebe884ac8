// The proxy devices: each wraps one real ggml device, and has a second, naming device for its expert buffer type.
#pragma once

#include "lookup/exclusion.h"
#include "ggml-backend-impl.h"
#include "backend/run_lock.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace expertier {

class ComputeRegion;
struct ProxyBackend;

struct ProxyDevice {
    ggml_backend_dev_t inner; // the real device
    std::string name;         // "TIER_" and the inner device's name
    std::string buffer_name;  // "EXPERTS_" and the inner device's name, as --override-tensor takes it
    std::string description;
    ggml_backend_device compute; // runs graphs; type GPU, so that layers are placed on it
    ggml_backend_device naming;  // runs nothing; the engine finds the expert buffer type through it, by name
    ggml_backend_buffer_type experts;
    std::atomic<ggml_backend_buffer_type_t> named{ nullptr }; // the naming device's type; null: `experts`
    std::atomic<int> n_backends{ 0 };                         // streams that may use the slots at the same time
    std::atomic<bool> is_hidden{ false };
    enum ggml_backend_dev_type (*inner_type)(ggml_backend_dev_t) = nullptr; // the real device's own, while it is hidden
    ggml_backend_buffer_type_t (*inner_buffer_type)(ggml_backend_dev_t) = nullptr;
    ggml_backend_buffer_type wrapper; // the compute device's default type while there are compute regions
    RunLock runs;                     // graphs on this device, and moves of its slots
    LookupExclusion lookup_exclusion; // between graphs with device look-ups and calls that wait for the device

    // Where the engine may compute: one region for each model whose tiers are bound.
    std::vector<std::shared_ptr<ComputeRegion>> compute_regions();
    void follow_demand(); // calls ComputeRegion::follow_demand of every region
    bool has_regions() const { return n_regions > 0; }
    void add_region(std::shared_ptr<ComputeRegion> region);
    void remove_region(const std::shared_ptr<ComputeRegion> & region);

    std::mutex backends_mutex; // guards `backends`
    std::vector<ProxyBackend *> backends;
    std::mutex regions_mutex;                            // guards `regions`
    std::vector<std::shared_ptr<ComputeRegion>> regions; // first the `n_regions` in which the engine may compute
    std::atomic<int> n_regions{ 0 };
    std::atomic<int> n_bound{ 0 }; // how many `regions` there are, read without the mutex
};

// The proxy that `device` is the compute device of; null for any other device.
ProxyDevice * find_proxy(ggml_backend_dev_t device);

// Makes a proxy for every device that is registered now; `registry` becomes their registry entry.
void make_proxies(ggml_backend_reg_t registry);

const std::vector<ProxyDevice *> & proxies();

// Hides every GPU but these proxies from a host that does not let its user choose devices. A hidden GPU says that it is
// an integrated GPU, which the engine does not take where there are other GPUs. For tensor split the engine does not
// ask what kind a device is, and takes every device whose memory is not the CPU's: hidden GPUs then also say that their
// memory is the CPU's, until a proxy that is shown is first used. Not to be called while another thread loads a model.
void show_only(const std::vector<const ProxyDevice *> & shown, bool splits_tensors);
void show_all();

// The default buffer type of a real device, whatever it says while it is hidden.
ggml_backend_buffer_type_t own_buffer_type(ggml_backend_dev_t device);

} // namespace expertier
