"""Bugs in the proxy (C++) that quick tests over the fakes must catch: look-ups on the device, and fetching ahead."""

from __future__ import annotations

from mutants.mutant import Mutant

_PROXY = "engine_adapter/ggml_proxy/"
_GPU = "tests/engine_adapter/gpu_engine/"
_LOOKUP = f"{_GPU}test_gpu_device_lookup.py"
_PREFETCH = f"{_GPU}test_gpu_prefetch.py"
_CAPTURES = f"{_GPU}test_captured_graphs.py"
_TABLES_FOLLOW = f"{_GPU}slab/test_slab_compute.py::test_tables_on_the_device_follow"

LOOKUP = (
    Mutant(
        "a look-up does not wait for the router",
        f"{_PROXY}lookup/device_lookup.cpp",
        "return wait_for(compute) && launch(layer,",
        "return launch(layer,",
        (f"{_LOOKUP}::test_prefetches_meanwhile",),
    ),
    Mutant(
        "experts do not wait for their look-up",
        f"{_PROXY}lookup/device_lookup.cpp",
        "    ggml_backend_event_wait(compute, after_.get());\n",
        "",
        (f"{_LOOKUP}::test_prefetches_meanwhile",),
    ),
    Mutant(
        "layers share a table on the device",
        f"{_PROXY}lookup/device_lookup.cpp",
        "        n += experts;\n",
        "        n = experts;\n",
        (f"{_LOOKUP}::test_prefetches_meanwhile",),
    ),
    Mutant(
        "a look-up that gave up waiting is believed",
        f"{_PROXY}lookup/device_lookup.cpp",
        "    return load(mailbox(layer) + late) != graph_;\n",
        "    return true;\n",
        (f"{_LOOKUP}::test_a_lookup_that_gave_up_waiting_has_the_step_run_again",),
    ),
    Mutant(
        "a step whose look-up was late stands",
        f"{_PROXY}lookup/run.cpp",
        "                falls_back_ = true; // the device had given up",
        "                // the device had given up",
        (f"{_LOOKUP}::test_a_lookup_that_gave_up_waiting_has_the_step_run_again",),
    ),
    Mutant(
        "a look-up's victim stays in the device's table",
        f"{_PROXY}lookup/run.cpp",
        "            std::replace(table.begin(), table.end(), slot, -1);\n",
        "",
        (f"{_LOOKUP}::test_prefetches_meanwhile",),
    ),
    Mutant(
        "a look-up is answered before its experts are there",
        f"{_PROXY}lookup/run.cpp",
        "        lookup_.upload_table(layer);\n        ggml_backend_synchronize(lookup_.uploads());\n"
        "        if (prefetch_run_) {",
        "        lookup_.upload_table(layer);\n        if (prefetch_run_) {",
        (f"{_LOOKUP}::test_prefetches_meanwhile",),
    ),
    Mutant(
        "a fill that the look-up gave up is believed",
        f"{_PROXY}lookup/run.cpp",
        "            tiers_.tables().policy().abort(tiers_.tables().directory(), layer, slots.data(), n);\n"
        "            falls_back_",
        "            tiers_.tables().policy().complete(tiers_.tables().directory(), layer, slots.data(), n);\n"
        "            tiers_.tables().policy().release(tiers_.tables().directory(), layer, slots.data(), n);\n"
        "            falls_back_",
        (f"{_LOOKUP}::test_logits_are_bit_identical",),
    ),
    Mutant(
        "a fallback runs again on what has become of its inputs",
        f"{_PROXY}lookup/run.cpp",
        "            plan_.inputs.restore(backend_.inner); // later",
        "            // later",
        (f"{_LOOKUP}::test_logits_are_bit_identical",),
    ),
    Mutant(
        "kept inputs lie on top of each other",
        f"{_PROXY}graph/input_backup.cpp",
        "ggml_nbytes(base), n_bytes_ });",
        "ggml_nbytes(base), 0 });",
        (f"{_LOOKUP}::test_logits_are_bit_identical",),
    ),
    Mutant(
        "layers' locks are given back before the look-ups are served",
        f"{_PROXY}lookup/run.cpp",
        "        bring_tables();\n        open_prefetch_run();\n",
        "        bring_tables();\n        locks_.clear();\n        open_prefetch_run();\n",
        (f"{_LOOKUP}::test_prefetches_meanwhile",),
    ),
    Mutant(
        "slots of the last look-up are let go while kernels read them",
        f"{_PROXY}lookup/run.cpp",
        "        if (!held_.empty()) {\n            backend_.deferred.add(",
        "        release_previous();\n        if (!held_.empty()) {\n            backend_.deferred.add(",
        (_PREFETCH, _LOOKUP),
    ),
    Mutant(
        "several contexts on a device have look-ups",
        f"{_PROXY}lookup/run.cpp",
        "backend.device->n_backends > 1 ||",
        "",
        (f"{_LOOKUP}::test_two_contexts_do_without",),
    ),
    Mutant(
        "a device's table that others have changed is not brought",
        f"{_PROXY}lookup/run.cpp",
        "                tiers_.tables().device_version(layer) ==\n",
        "                tiers_.tables().device_version(layer) > 0 ||\n"
        "                tiers_.tables().device_version(layer) ==\n",
        (f"{_LOOKUP}::test_prefetches_meanwhile",),
    ),
)

CAPTURES = (
    Mutant(
        "a captured graph stands for any other",
        f"{_PROXY}lookup/captured.h",
        "return executable_ != nullptr && key == key_;",
        "return executable_ != nullptr && key != 0;",
        (f"{_CAPTURES}::test_graphs_of_several_widths_are_captured_each",),
    ),
    Mutant(
        "a captured graph keeps the places of slots that have moved",
        f"{_PROXY}lookup/queue.cpp",
        "mixed(mixed(plan_.uid, (uint64_t) plan_.epoch), address(&lookup_));\n"
        "    for (const LookupPlan::Node & at : plan_.nodes) {\n",
        "mixed(plan_.uid, address(&lookup_));\n    for (const LookupPlan::Node & at : plan_.nodes) {\n        break;\n",
        (_TABLES_FOLLOW,),
    ),
    Mutant(
        "what follows a captured graph does not wait for it",
        f"{_PROXY}lookup/captured.cpp",
        "driver.graph_launch(executable_, driver.stream) == 0 &&\n           lookup.make_wait(compute);",
        "driver.graph_launch(executable_, driver.stream) == 0;",
        (_CAPTURES,),
    ),
    Mutant(
        "experts that are not quantised are captured",
        f"{_PROXY}lookup/plan.cpp",
        "ggml_is_quantized(node->src[0]->type) && ",
        "",
        (f"{_CAPTURES}::test_experts_that_are_not_quantised_are_not_captured",),
    ),
    Mutant(
        "look-ups that were captured count as launched",
        f"{_PROXY}lookup/queue.cpp",
        "        queued_.clear(); // nothing was\n",
        "",
        (f"{_CAPTURES}::test_a_graph_is_captured_once_and_launched_for_each_token",),
    ),
)

AHEAD = (
    Mutant(
        "each piece of a prefetched matrix is its first",
        f"{_PROXY}prefetch/run.cpp",
        "prefetch.copy + piece.source + prefetch.offset;",
        "prefetch.copy + piece.source;",
        (f"{_PREFETCH}::test_matrices_of_several_pieces",),
    ),
    Mutant(
        "each piece of a prefetched matrix goes where its first is",
        f"{_PROXY}prefetch/run.cpp",
        "    piece.offset += prefetch.offset;\n",
        "",
        (f"{_PREFETCH}::test_matrices_of_several_pieces",),
    ),
    Mutant(
        "the rest of a prefetch that is asked for is left out",
        f"{_PROXY}prefetch/run.cpp",
        "    while (prefetch.state == State::Copying) {\n        queue_piece(prefetch, false);\n    }\n",
        "",
        (f"{_PREFETCH}::test_matrices_of_several_pieces",),
    ),
    Mutant(
        "a prefetch that was given up counts as complete",
        f"{_PROXY}prefetch/run.cpp",
        "            tiers_.tables().policy().abort(tiers_.tables().directory(), prefetch.layer, &prefetch.slot, 1);\n",
        "            complete_fill(prefetch);\n",
        (f"{_PREFETCH}::test_matrices_of_several_pieces",),
    ),
    Mutant(
        "a prefetch whose entry is queued is dropped when its look-up does not want it",
        f"{_PROXY}prefetch/run.cpp",
        "prefetch.state == State::Copying ? State::Dropped : State::Unwanted;",
        "State::Dropped;",
        (_PREFETCH,),
    ),
    Mutant(
        "an unwanted prefetch never gives its place back",
        f"{_PROXY}prefetch/run.cpp",
        "        case State::Unwanted:\n            complete_fill(prefetch);\n"
        "            prefetch.state = State::Free;\n",
        "        case State::Unwanted:\n            complete_fill(prefetch);\n"
        "            prefetch.state = State::Landed;\n",
        (_PREFETCH,),
    ),
    Mutant(
        "the first layer foretells only the farthest",
        f"{_PROXY}lookup/queue.cpp",
        "return { i == 0 ? 1 : last, std::min(",
        "return { last, std::min(",
        (f"{_PREFETCH}::test_counters_tell_the_share_that_was_foretold",),
    ),
    Mutant(
        "layers that rarely miss are predicted",
        f"{_PROXY}lookup/queue.cpp",
        "return !tiers_.predictor()->rare_miss_layers.has(next.layer) && n < ",
        "return n < ",
        (f"{_PREFETCH}::test_layers_that_hardly_miss_are_not_foretold",),
    ),
    Mutant(
        "a prediction gives up an expert that the policy keeps",
        f"{_PROXY}prefetch/predictor.cpp",
        "lookup_.launch_params(layer) + first_candidate);",
        "lookup_.launch_params(layer));",
        (_PREFETCH,),
    ),
    Mutant(
        "layers never count as rarely missing",
        f"{_PROXY}prefetch/rare_miss_layers.cpp",
        "layer.n_graphs >= enough_graphs && layer.n_missing",
        "layer.n_graphs >= memory && layer.n_missing",
        ("tests/engine_adapter/ggml_proxy/test_rare_miss_layers.py",),
    ),
    Mutant(
        "a distance that was no better is kept",
        f"{_PROXY}prefetch/distance.cpp",
        "    layers_ = from_;\n",
        "",
        ("tests/engine_adapter/ggml_proxy/test_prefetch_distance.py",),
    ),
)

LOOKUP_MUTANTS = (*LOOKUP, *CAPTURES, *AHEAD)
