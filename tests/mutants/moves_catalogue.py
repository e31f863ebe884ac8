"""Bugs in the proxy (C++) that quick tests over the fakes must catch: streamed layers, moves, and several devices."""

from __future__ import annotations

from mutants.mutant import Mutant

_PROXY = "engine_adapter/ggml_proxy/"
_GPU = "tests/engine_adapter/gpu_engine/"
_PARITY = f"{_GPU}test_gpu_parity.py"
_CONTEXTS = f"{_GPU}test_gpu_contexts.py"
_ON_THREADS = f"{_CONTEXTS}::test_contexts_on_threads"
_COMPUTE = f"{_GPU}slab/test_slab_compute.py"
_DEMAND = f"{_GPU}test_follow_demand.py"
_MOVES = f"{_GPU}slab/test_queued_moves.py"
_TENSOR = f"{_GPU}split/test_tensor_split.py"

STAGED = (
    Mutant(
        "a streamed expert lies at its place in the list",
        f"{_PROXY}graph/prefill_stream.cpp",
        "base + piece.streamed_offset + experts[i] * piece.streamed_stride",
        "base + piece.streamed_offset + i * piece.streamed_stride",
        (_CONTEXTS,),
    ),
    Mutant(
        "a place is filled while the layer before is computed there",
        f"{_PROXY}graph/prefill_stream.cpp",
        "    queue_after_computing(place, uploader);\n",
        "",
        (_ON_THREADS,),
    ),
    Mutant(
        "streamed experts are read from slots before the place is free",
        f"{_PROXY}graph/prefill_stream.cpp",
        "    queue_after_computing(place, copier_.get());\n",
        "",
        (_PARITY, _CONTEXTS),
    ),
    Mutant(
        "a streamed layer does not wait for what comes from slots",
        f"{_PROXY}graph/prefill_stream.cpp",
        "    end_stream(place.copied, copier_.get(), compute);\n",
        "",
        (_PARITY, _CONTEXTS),
    ),
    Mutant(
        "a streamed layer does not wait for what comes from the host",
        f"{_PROXY}graph/prefill_stream.cpp",
        "    end_stream(place.uploaded, uploader, compute);\n",
        "",
        (_PARITY,),
    ),
    Mutant(
        "Python fills a place while the layer before is computed there",
        f"{_PROXY}graph/prefill_stream.cpp",
        "            ggml_backend_event_synchronize(place.computed.get()); // Python's",
        "            // Python's",
        (_PARITY,),
    ),
    Mutant(
        "slots are let go before a streamed layer was copied from them",
        f"{_PROXY}graph/prefill_stream.cpp",
        "    for (const Event * done : { &place.uploaded, &place.copied }) {\n",
        "    for (const Event * done : { &place.uploaded }) {\n",
        (_CONTEXTS,),
    ),
)

MOVES = (
    Mutant(
        "slot tensors stay where slots were before a move",
        f"{_PROXY}residency/slot_tensors.cpp",
        "            slots->data = static_cast<char *>(slab_base_) + from.matrices[j].offset;\n",
        "",
        (f"{_DEMAND}::test_slots_change_layers_where_the_engine_computes_elsewhere",),
    ),
    Mutant(
        "fills go where slots were before a move",
        f"{_PROXY}residency/slot_tensors.cpp",
        "        layer.copies.assign(from.copies, from.copies + from.n_copies);\n        for (size_t",
        "        for (size_t",
        (f"{_DEMAND}::test_slots_change_layers_where_the_engine_computes_elsewhere",),
    ),
    Mutant(
        "a layer that has lost slots is still whole",
        f"{_PROXY}residency/tables.cpp",
        "        layer.is_fully_resident = false;\n",
        "",
        (f"{_DEMAND}::test_slots_change_layers",),
    ),
    Mutant(
        "the device's table is the one from before a move",
        f"{_PROXY}residency/tables.cpp",
        "        layer.device_version = -1;\n",
        "",
        (f"{_COMPUTE}::test_tables_on_the_device_follow",),
    ),
    Mutant(
        "the layout of a move that failed is not taken over",
        f"{_PROXY}residency/moved_slots.cpp",
        "            tables_.take_layout(*compute.binding);\n            slots_.take_layout(*compute.binding);\n",
        "            if (done == EXPERTIER_FILLED) {\n"
        "                tables_.take_layout(*compute.binding);\n"
        "                slots_.take_layout(*compute.binding);\n"
        "            }\n",
        (f"{_COMPUTE}::test_a_move_that_fails", f"{_DEMAND}::test_a_move_that_fails_leaves_all_as_it_was"),
    ),
    Mutant(
        "slots move under what is queued",
        f"{_PROXY}backend/backend.cpp",
        "        ggml_backend_synchronize(backend->inner);\n",
        "",
        (_DEMAND, _COMPUTE),
    ),
    Mutant(
        "overlapping bytes move from the wrong end",
        f"{_PROXY}slab/queued_moves.cpp",
        "        const size_t at = target < source ? done : n_bytes - done - n; // so that unread",
        "        const size_t at = done; // so that unread",
        (_MOVES,),
    ),
    Mutant(
        "rows of zeros are written over while they are uploaded",
        f"{_PROXY}slab/queued_moves.cpp",
        "        ggml_backend_synchronize(stream_.get()); // the last call's upload",
        "        // the last call's upload",
        (_MOVES,),
    ),
    Mutant(
        "zeros begin where the first row is",
        f"{_PROXY}slab/queued_zeros.cpp",
        "[begin](int64_t row) { return row - begin; }",
        "[begin = *lowest](int64_t row) { return row - begin; }",
        (_MOVES,),
    ),
    Mutant(
        "the end of a piece of zeros is left out",
        f"{_PROXY}slab/queued_zeros.cpp",
        "for (size_t done = 0; done < piece->n_bytes; done += row_bytes_) {",
        "for (size_t done = row_bytes_; done < piece->n_bytes + (piece->n_bytes == row_bytes_); done += row_bytes_) {",
        (_MOVES,),
    ),
)

COMPUTE = (
    Mutant(
        "compute buffers lie on top of each other",
        f"{_PROXY}slab/compute_region.cpp",
        "        offset = after->offset + after->size;\n",
        "        offset = after->offset;\n",
        (f"{_COMPUTE}::test_buffers_lie_side_by_side",),
    ),
    Mutant(
        "the boundary comes down over a buffer that is needed",
        f"{_PROXY}slab/compute_region.cpp",
        "place.holds ? end_of(place) : 0",
        "place.holds ? place.offset : 0",
        (f"{_COMPUTE}::test_wide_short_wide",),
    ),
    Mutant(
        "a graph computes where slots still are",
        f"{_PROXY}slab/compute_region.cpp",
        "    place.holds = end_of(place) <= boundary_;\n",
        "    place.holds = place.offset <= boundary_;\n",
        (f"{_COMPUTE}::test_wide_short_wide",),
    ),
)

TOGETHER = (
    Mutant(
        "what a backend of a group has begun is forgotten",
        f"{_PROXY}graph/graph.cpp",
        "        waiting.keeps = true;\n",
        "",
        (_TENSOR,),
    ),
    Mutant(
        "sums by copies overwrite what is still read",
        f"{_PROXY}backend/backend.cpp",
        "        wait_for(self(from), self(to));\n",
        "",
        (f"{_TENSOR}::test_sums_by_copies_where_the_backend_has_none_of_its_own",),
    ),
    Mutant(
        "only the first device's shards are told to the engine",
        f"{_PROXY}backend/split_buffer.cpp",
        "split.n_segments * self.devices.size(), state.ne);",
        "split.n_segments, state.ne);",
        (_TENSOR,),
    ),
    Mutant(
        "a split of the same names is taken for the same",
        f"{_PROXY}backend/split_buffer.cpp",
        " && memcmp(&one.second, &other.second, sizeof(expertier_split)) == 0;",
        ";",
        (_TENSOR,),
    ),
    Mutant(
        "expert tensors belong to the tiers of any device",
        f"{_PROXY}backend/expert_buffer.cpp",
        "        if (each->buffer_type() == type) {\n",
        "        if (each->buffer_type()) {\n",
        (f"{_GPU}split/test_layer_split.py", f"{_GPU}split/test_layer_split_runs.py"),
    ),
    Mutant(
        "the loader gets bytes from another place of the file",
        "engine_adapter/llama_host/file.cpp",
        "const int64_t offset = extent.offset + (position_ - extent.begin);",
        "const int64_t offset = extent.offset;",
        ("tests/engine_adapter/llama_cpp/test_file_shards.py",),
    ),
)

MOVE_MUTANTS = (*STAGED, *MOVES, *COMPUTE, *TOGETHER)
