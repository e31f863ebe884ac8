#include "backend/split_buffer.h"

#include "abi/abi.h"
#include "abi/bound_tiers.h"
#include "abi/split_abi.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace expertier {

namespace {

using Splits = std::map<std::string, expertier_split>;

bool are_equal(const Splits & a, const Splits & b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto & one, const auto & other) {
        return one.first == other.first && memcmp(&one.second, &other.second, sizeof(expertier_split)) == 0;
    });
}

// What ggml asks us about the tensors of a Meta device of ours. ggml keeps Meta devices until the process ends, so
// these objects stay as well.
struct SplitExperts {
    std::vector<ggml_backend_dev_t> devices;
    Splits splits;
    ggml_backend_buffer_type_t type = nullptr;
};

constexpr char lost_name[] = "Meta()";
constexpr char our_name[] = "Tier()";
static_assert(sizeof(lost_name) == sizeof(our_name));

std::mutex mutex; // guards `all`, and ggml's own tables of Meta devices, which have no lock
std::vector<std::unique_ptr<SplitExperts>> all;

ggml_backend_meta_split_state split_of(const ggml_tensor * tensor, void * context) {
    const SplitExperts & self = *static_cast<const SplitExperts *>(context);
    ggml_backend_meta_split_state state = {};
    state.axis = GGML_BACKEND_SPLIT_AXIS_MIRRORED; // a tensor that is not ours; it gets no slot, as none has its shape
    state.nr[0] = 1;
    state.n_segments = 1;
    const auto found = self.splits.find(tensor->name);
    if (found != self.splits.end()) {
        const expertier_split & split = found->second;
        state.axis = (ggml_backend_meta_split_axis) split.axis;
        state.n_segments = (uint32_t) split.n_segments;
        std::copy_n(split.repeats, split.n_segments, state.nr);
        std::copy_n(split.ne, split.n_segments * self.devices.size(), state.ne);
    }
    return state;
}

// Gives the buffer type a name of its own, because the engine's loader takes buffer types of the same name for the same
// type. In some releases the name lacks the devices' names, so that all Meta types have the same name; then a name of
// the same length is written over it, in place. Options of the engine's tools end a name at a comma, so commas are
// replaced.
void tell_apart(ggml_backend_buffer_type_t type) {
    char * name = const_cast<char *>(ggml_backend_buft_name(type));
    std::replace(name, name + strlen(name), ',', '+');
    if (strcmp(name, lost_name) == 0) {
        memcpy(name, our_name, sizeof(our_name));
    } else if (strstr(name, "EXPERTS_") == nullptr && strcmp(name, our_name) != 0) {
        throw std::runtime_error(std::string("its buffer type for split tensors is called ") + name +
                                 ", which does not say what lies in it");
    }
}

ggml_backend_buffer_type_t buffer_type(std::vector<ggml_backend_dev_t> && devices, Splits && splits) {
    std::lock_guard<std::mutex> guard(mutex);
    for (const auto & known : all) { // a model that is loaded again gets the same type
        if (known->type && known->devices == devices && are_equal(known->splits, splits)) {
            return known->type;
        }
    }
    all.push_back(std::make_unique<SplitExperts>(SplitExperts{ std::move(devices), std::move(splits), nullptr }));
    SplitExperts & self = *all.back();
    ggml_backend_dev_t meta = ggml_backend_meta_device(self.devices.data(), self.devices.size(), split_of, &self);
    ExpertsAsDefault asked;
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(meta); // kept by ggml from now on
    tell_apart(type);
    self.type = type;
    return type;
}

} // namespace

} // namespace expertier

// The ggml buffer type for expert tensors that are split among the devices of `tiers`: the tensor `names[i]` is split
// as `splits[i]` says. Returns null and fills `error` when that is not possible.
EXPERTIER_EXPORT void * expertier_split_buffer_type(expertier_tiers * const * tiers, int32_t n_tiers,
                                                    const char * const * names, const expertier_split * splits,
                                                    int32_t n_splits, char * error, size_t error_size) {
    try {
        std::vector<ggml_backend_dev_t> devices;
        for (int32_t i = 0; i < n_tiers; i++) {
            devices.push_back(&tiers[i]->device->compute);
        }
        expertier::Splits by_name;
        for (int32_t i = 0; i < n_splits; i++) {
            by_name.emplace(names[i], splits[i]);
        }
        return expertier::buffer_type(std::move(devices), std::move(by_name));
    } catch (const std::exception & problem) {
        snprintf(error, error_size, "%s", problem.what());
        return nullptr;
    }
}

// Has the engine find `type` by its name among its devices' buffer types, for a host that loads a model by itself, and
// returns the name. A null `type` ends that.
EXPERTIER_EXPORT const char * expertier_name_split_type(expertier_tiers * tiers, ggml_backend_buffer_type_t type) {
    tiers->device->named = type;
    return type ? ggml_backend_buft_name(type) : "";
}
