// One pass: gather the rows of a group of experts, run the chain on them over the slots, scatter the result.
//
//     input rows ── GET_ROWS ── gate ┐
//                          └─── up  ─┴─ GLU ── down ── SET_ROWS ── output of the call

#include "graph/paths/passes.h"

#include "graph/paths/chain.h"
#include "ggml-alloc.h"
#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "graph/paths/snapshots.h"
#include "residency/errors.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

namespace expertier {

namespace {

struct Rows {
    std::vector<int32_t> experts; // the expert of each row of a group; likewise its slot and its place
    std::vector<int32_t> slots;
    std::vector<int64_t> places; // token * n_used + k
};

// `tensor` as a table of rows; a copy of it where its rows are not evenly spaced.
ggml_tensor * as_rows(ggml_context * context, const ggml_tensor * tensor) {
    ggml_tensor * leaf = without_graph(context, tensor);
    if (tensor->ne[1] > 1 && tensor->nb[2] != tensor->ne[1] * tensor->nb[1]) {
        return ggml_reshape_2d(context, ggml_cont(context, leaf), tensor->ne[0], tensor->ne[1] * tensor->ne[2]);
    }
    leaf->nb[1] = tensor->ne[1] == 1 ? tensor->nb[2] : tensor->nb[1];
    leaf->ne[1] *= leaf->ne[2];
    leaf->ne[2] = 1;
    leaf->nb[2] = leaf->nb[3] = leaf->nb[1] * leaf->ne[1];
    return leaf;
}

class PassRun {
  public:
    PassRun(ProxyBackend & backend, ggml_cgraph * graph, const ExpertCall & call)
        : backend_(backend), graph_(graph), call_(call), tiers_(*call.tiers) {}

    ggml_status run() {
        tiers_.counters.pass_calls += 1;
        const ExpertChain chain = find_chain(graph_, call_);
        if (!chain.nodes.empty() && chain.inputs.size() <= Snapshots::max_inputs) {
            Snapshots snapshots;
            if (!snapshots.take(backend_.inner, chain)) {
                set_error("no device memory for the rows of a pass");
                return GGML_STATUS_ALLOC_FAILED;
            }
            for (size_t i = 0; i < chain.others.size();) { // neighbours run together, as the backend may fuse them
                const int begin = chain.others[i];
                int end = begin;
                while (i < chain.others.size() && chain.others[i] == end) {
                    end++, i++;
                }
                if (ggml_status status = run_nodes(begin, end)) {
                    return status;
                }
                snapshots.retake(graph_, begin, end);
            }
            return run_chain(chain, snapshots);
        }

        // There is no chain: the call's nodes run one by one, in the graph's order.
        const Snapshots none;
        int next = call_.first;
        for (int i = call_.first; i <= call_.last; i++) {
            if (!belongs(call_, graph_->nodes[i])) {
                continue;
            }
            if (ggml_status status = run_nodes(next, i)) {
                return status;
            }
            if (ggml_status status = run_chain(single_node_chain(graph_->nodes[i]), none)) {
                return status;
            }
            next = i + 1;
        }
        return GGML_STATUS_SUCCESS;
    }

  private:
    ggml_status run_nodes(int begin, int end) {
        if (begin >= end) {
            return GGML_STATUS_SUCCESS;
        }
        ggml_cgraph segment = ggml_graph_view(graph_, begin, end);
        tiers_.counters.segments += 1;
        const ggml_status status = ggml_backend_graph_compute_async(backend_.inner, &segment);
        ggml_backend_synchronize(backend_.inner);
        return status;
    }

    ggml_status run_chain(const ExpertChain & chain, const Snapshots & snapshots) {
        std::vector<int32_t> order = call_.experts;
        tiers_.tables().resident_first(call_.layer, order);
        const size_t n_slots = tiers_.slots().n_slots(call_.layer);
        for (size_t begin = 0; begin < order.size(); begin += n_slots) {
            std::vector<int32_t> group(order.begin() + begin, order.begin() + std::min(order.size(), begin + n_slots));
            const PinnedSlots pinned = tiers_.acquire(backend_.inner, call_.layer, group);
            if (!pinned) {
                return GGML_STATUS_FAILED;
            }
            tiers_.counters.passes += 1;
            if (ggml_status status = run_group(chain, snapshots, rows_of(group, pinned.slots()))) {
                return status;
            }
        }
        return GGML_STATUS_SUCCESS;
    }

    Rows rows_of(const std::vector<int32_t> & group, const std::vector<int32_t> & slots) const {
        std::vector<int32_t> slot_of(tiers_.slots().n_experts(call_.layer), -1);
        for (size_t i = 0; i < group.size(); i++) {
            slot_of[group[i]] = slots[i];
        }
        Rows rows;
        for (size_t place = 0; place < call_.expert_of_row.size(); place++) {
            const int32_t expert = call_.expert_of_row[place];
            if (slot_of[expert] >= 0) {
                rows.experts.push_back(expert);
                rows.slots.push_back(slot_of[expert]);
                rows.places.push_back((int64_t) place);
            }
        }
        return rows;
    }

    ggml_status run_group(const ExpertChain & chain, const Snapshots & snapshots, const Rows & rows) {
        const int64_t n = (int64_t) rows.places.size();
        const size_t n_nodes = chain.nodes.size() + 6 * chain.inputs.size() + 8;
        ScopedContext scope(2 * n_nodes + 8, n_nodes);
        ggml_context * context = scope.context;

        ggml_tensor * slots = new_input(context, GGML_TYPE_I32, 1, n);
        ggml_tensor * experts = new_input(context, GGML_TYPE_I32, 1, n);
        ggml_tensor * places = new_input(context, GGML_TYPE_I64, n, 1);

        std::unordered_map<const ggml_tensor *, ggml_tensor *> gathered; // original tensor -> its rows of this group
        std::vector<std::pair<ggml_tensor *, std::vector<int32_t>>> row_lists;
        for (const ggml_tensor * input : chain.inputs) {
            ggml_tensor * list = new_input(context, GGML_TYPE_I32, n, 1);
            row_lists.emplace_back(list, input_rows(input, rows));
            ggml_tensor * taken = ggml_get_rows(context, as_rows(context, snapshots.of(input)), list);
            gathered[input] = ggml_reshape_3d(context, taken, input->ne[0], 1, n);
        }
        for (ggml_tensor * node : chain.nodes) {
            gathered[node] = rebuild(context, node, gathered, slots, experts, n);
        }
        ggml_tensor * output = chain.nodes.back();
        ggml_tensor * result = ggml_reshape_2d(context, gathered[output], output->ne[0], n);
        ggml_tensor * store = ggml_set_rows(context, as_rows(context, output), result, places);

        ggml_cgraph * graph = ggml_new_graph_custom(context, n_nodes, false);
        ggml_build_forward_expand(graph, store);
        if (backend_.pass_allocator == nullptr) {
            backend_.pass_allocator = ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend_.inner));
        }
        if (!ggml_gallocr_alloc_graph(backend_.pass_allocator, graph)) {
            set_error("no device memory for the temporaries of a pass over " + std::to_string(n) + " rows");
            return GGML_STATUS_ALLOC_FAILED;
        }
        set(slots, rows.slots);
        set(experts, rows.experts);
        set(places, rows.places);
        for (const auto & [list, values] : row_lists) {
            set(list, values);
        }
        tiers_.counters.segments += 1;
        return ggml_backend_graph_compute(backend_.inner, graph); // the next group reuses slots and temporaries
    }

    // A copy of `node` that computes on the rows of a group.
    ggml_tensor * rebuild(ggml_context * context, const ggml_tensor * node,
                          std::unordered_map<const ggml_tensor *, ggml_tensor *> & gathered, ggml_tensor * slots,
                          ggml_tensor * experts, int64_t n) {
        ggml_tensor * again = nullptr;
        if (const ExpertTensor * expert = find_expert_operand(node)) {
            again = ggml_mul_mat_id(context, tiers_.slots().of(expert->ref), gathered[node->src[1]], slots);
        } else if (node->op == GGML_OP_VIEW) { // it shows some columns of a chain node's rows
            ggml_tensor * rows = gathered[node->src[0]];
            again = ggml_view_3d(context, rows, node->ne[0], 1, n, rows->nb[1], rows->nb[2], node->view_offs);
        } else {
            again = ggml_new_tensor_3d(context, node->type, node->ne[0], 1, n);
            again->op = node->op;
            for (int i = 0; i < GGML_MAX_SRC; i++) {
                const auto found = gathered.find(node->src[i]);
                again->src[i] = found != gathered.end() ? found->second : node->src[i];
            }
            if (node->op == GGML_OP_ADD_ID) {
                again->src[2] = experts;
            }
        }
        memcpy(again->op_params, node->op_params, sizeof(node->op_params));
        return again;
    }

    static ggml_tensor * new_input(ggml_context * context, ggml_type type, int64_t ne0, int64_t ne1) {
        ggml_tensor * tensor = ggml_new_tensor_2d(context, type, ne0, ne1);
        ggml_set_input(tensor);
        return tensor;
    }

    template <typename T> static void set(ggml_tensor * tensor, const std::vector<T> & values) {
        if (tensor->buffer) { // an input that this chain does not use has no memory
            ggml_backend_tensor_set(tensor, values.data(), 0, values.size() * sizeof(T));
        }
    }

    std::vector<int32_t> input_rows(const ggml_tensor * input, const Rows & rows) const {
        std::vector<int32_t> list(rows.places.size());
        for (size_t i = 0; i < list.size(); i++) {
            const int64_t token = rows.places[i] / call_.n_used;
            const int64_t k = rows.places[i] % call_.n_used;
            list[i] = (int32_t) (token * input->ne[1] + k % input->ne[1]);
        }
        return list;
    }

    ProxyBackend & backend_;
    ggml_cgraph * graph_;
    const ExpertCall & call_;
    Tiers & tiers_;
};

} // namespace

ggml_status PassesPath::begin(ExpertCall & call) {
    segments_.skip_to(call.last + 1);
    return PassRun(backend_, graph_, call).run();
}

} // namespace expertier
