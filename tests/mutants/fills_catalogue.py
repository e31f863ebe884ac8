"""Bugs in the proxy (C++) that quick tests over the fakes must catch: fills, graphs over slots, and passes."""

from __future__ import annotations

from mutants.mutant import Mutant

_PROXY = "engine_adapter/ggml_proxy/"
_GPU = "tests/engine_adapter/gpu_engine/"
_PARITY = f"{_GPU}test_gpu_parity.py"
_CONTEXTS = f"{_GPU}test_gpu_contexts.py"
_ON_THREADS = f"{_CONTEXTS}::test_contexts_on_threads"
_FAILURES = f"{_GPU}test_gpu_failures.py"
_COMPUTE = f"{_GPU}slab/test_slab_compute.py"
_GRAPHS = "tests/engine_adapter/ggml_proxy/test_expert_graphs.py"
_SERVED = f"{_GRAPHS}::test_served_graphs_are_bit_identical"

FILLS = (
    Mutant(
        "a slot is one stride too far",
        f"{_PROXY}residency/slot_tensors.cpp",
        "copy.offset + slot * copy.stride, copy.n_bytes);",
        "copy.offset + (slot + 1) * copy.stride, copy.n_bytes);",
        (_PARITY,),
    ),
    Mutant(
        "slots of a matrix lie without gaps",
        f"{_PROXY}residency/slot_tensors.cpp",
        "            tensor->nb[2] = matrix.stride;\n",
        "",
        (_PARITY,),
    ),
    Mutant(
        "a failed fill of the engine's is complete",
        f"{_PROXY}residency/tables.cpp",
        "is_filled ? policy_.complete : policy_.abort;",
        "is_filled ? policy_.complete : policy_.complete;",
        (f"{_FAILURES}::test_a_failed_read_fails_the_batch",),
    ),
    Mutant(
        "others use a slot whose copy is still queued",
        f"{_PROXY}residency/tiers.cpp",
        "            ggml_backend_synchronize(stream); // from end_fill() on",
        "            // from end_fill() on",
        (_ON_THREADS,),
    ),
    Mutant(
        "reads of the pool's copies are not counted",
        f"{_PROXY}residency/pool_copies.cpp",
        "    copies_.readers[index] += 1;\n",
        "",
        (_CONTEXTS,),
    ),
    Mutant(
        "ends of reads of the pool's copies are not counted",
        f"{_PROXY}residency/pool_copies.cpp",
        "        copies_.readers[index] -= 1;\n",
        "        (void) index;\n",
        (_CONTEXTS,),
    ),
    Mutant(
        "who waits for slots is not told",
        f"{_PROXY}residency/tables.cpp",
        '": the residency tables refused the release of slots");\n    }\n    lock.notify_all();\n',
        '": the residency tables refused the release of slots");\n    }\n',
        (_ON_THREADS,),
        may_hang=True,
    ),
    Mutant(
        "a layer is whole when its slots are taken",
        f"{_PROXY}residency/tables.cpp",
        "policy_.is_fully_resident(directory_, layer) == 1;",
        "policy_.is_fully_resident(directory_, layer) >= 0;",
        (f"{_FAILURES}::test_while_all_reads_fail",),
    ),
    Mutant(
        "fills are refused while one runs",
        f"{_PROXY}residency/misses.cpp",
        "    while (fills_running_ > 0) {\n",
        "    while (fills_running_ > 1) {\n",
        ("tests/serve/test_misses_without_python.py",),
    ),
    Mutant(
        "zeros of a graph that nobody reads are taken for experts",
        f"{_PROXY}residency/tables.cpp",
        "    const auto end = bytes == PinnedSlots::Bytes::zero_filled ? policy_.abort : policy_.release;\n",
        "    if (bytes == PinnedSlots::Bytes::zero_filled) {\n"
        "        policy_.complete(directory_, layer, slots.data(), n);\n"
        "    }\n"
        "    const auto end = policy_.release;\n",
        ("tests/serve/test_misses_without_python.py",),
    ),
)

GRAPHS = (
    Mutant(
        "slots are let go while queued kernels read them",
        f"{_PROXY}graph/paths/looked_up.cpp",
        "        if (!backend_is_idle) {\n            ggml_backend_synchronize(backend_.inner); // queued",
        "        if (false && !backend_is_idle) {\n            ggml_backend_synchronize(backend_.inner); // queued",
        (_ON_THREADS, f"{_CONTEXTS}::test_prefetches_meanwhile"),
    ),
    Mutant(
        "a graph keeps our slots",
        f"{_PROXY}graph/segments.cpp",
        "        undo->node->src[2] = undo->ids;\n",
        "",
        (_SERVED,),
    ),
    Mutant(
        "a segment's number does not tell where its slots are",
        f"{_PROXY}graph/segments.cpp",
        "mixed(mixed(mixed(uid, next_), end), placed_) | 1",
        "mixed(mixed(uid, next_), end) | 1",
        (_COMPUTE,),
    ),
    Mutant(
        "ids are read before the router has run",
        f"{_PROXY}graph/expert_call.cpp",
        "copy, 0, n_bytes);\n        ggml_backend_synchronize(backend);\n",
        "copy, 0, n_bytes);\n",
        (_PARITY,),
    ),
    Mutant(
        "an expert's bytes are read back as zeros, and nobody is told",
        f"{_PROXY}backend/expert_buffer.cpp",
        "    context(buffer)->readable.read(tensor, data, offset, size);\n",
        "    (void) buffer, (void) tensor, (void) offset, __builtin_memset(data, 0, size);\n",
        (f"{_GRAPHS}::test_the_scheduler_gets_the_bytes_that_it_asks_for",),
    ),
)

PASSES = (
    Mutant(
        "a pass begins while the one before still computes",
        f"{_PROXY}graph/paths/passes.cpp",
        "return ggml_backend_graph_compute(backend_.inner, graph); // the next",
        "return ggml_backend_graph_compute_async(backend_.inner, graph); // the next",
        (_PARITY,),
    ),
    Mutant(
        "rows of an input are another token's",
        f"{_PROXY}graph/paths/passes.cpp",
        "(token * input->ne[1] + k % input->ne[1]);",
        "(token + k % input->ne[1]);",
        (_SERVED,),
    ),
    Mutant(
        "an input of a chain that changes is not copied again",
        f"{_PROXY}graph/paths/passes.cpp",
        "                snapshots.retake(graph_, begin, end);\n",
        "",
        (_SERVED,),
    ),
    Mutant(
        "a chain whose input changes runs as one",
        f"{_PROXY}graph/paths/chain.cpp",
        "            if (changes(graph->nodes[i], input)) {\n",
        "            if (false && changes(graph->nodes[i], input)) {\n",
        (_SERVED,),
    ),
    Mutant(
        "a chain's inner node that others read runs as one",
        f"{_PROXY}graph/paths/chain.cpp",
        "            count_reads(chain.nodes, chain.nodes[i]) != ggml_node_get_use_count(graph, indices[i])) {\n",
        "            false) {\n",
        (_SERVED,),
    ),
    Mutant(
        "the last expert of a full pass is left out",
        f"{_PROXY}graph/paths/passes.cpp",
        "        for (size_t begin = 0; begin < order.size(); begin += n_slots) {\n",
        "        for (size_t begin = 0; begin + 1 < order.size() || begin == 0; begin += n_slots) {\n",
        (_SERVED,),
    ),
)

FILL_MUTANTS = (*FILLS, *GRAPHS, *PASSES)
