"""Bugs in the Python of engine_adapter that quick tests must catch."""

from __future__ import annotations

from mutants.mutant import Mutant

_GPU = "tests/engine_adapter/gpu_engine/"
_COMPUTE = f"{_GPU}slab/test_slab_compute.py"
_DEMAND = f"{_GPU}test_follow_demand.py"
_FAILED_MOVES = (
    f"{_COMPUTE}::test_a_move_that_fails",
    f"{_DEMAND}::test_a_move_that_fails_leaves_all_as_it_was",
)
_FAILED_READS = "tests/engine_adapter/binding/test_failed_reads.py"
_STRUCTS = ("tests/engine_adapter/binding/test_bound_structs.py",)

BINDING = (
    Mutant(
        "a fill is believed before its bytes are there",
        "engine_adapter/binding/tier_binding.py",
        "            serve(np.ctypeslib.as_array(experts, (n,)).copy())\n            done[0] = abi.FILLED\n",
        "            done[0] = abi.FILLED\n            serve(np.ctypeslib.as_array(experts, (n,)).copy())\n",
        (_FAILED_READS,),
    ),
    Mutant(
        "a batch's error has the cause of another one's",
        "engine_adapter/binding/tier_binding.py",
        "        self._fill_errors.last = None\n",
        "",
        (f"{_FAILED_READS}::test_a_later_failure_does_not_have_its_cause",),
    ),
    Mutant(
        "a failed binding leaves the tiers bound",
        "engine_adapter/binding/tier_binding.py",
        "            manager.engine.unbind()\n            raise\n",
        "            raise\n",
        (f"{_FAILED_READS}::test_the_binding_survives_a_bind_that_fails",),
    ),
)

STRUCTS = (
    Mutant(
        "copies go where slots were before a move",
        "engine_adapter/binding/bound_structs.py",
        "        self._copy_offsets[:] = now.offsets[self._matrix_of_copy]\n",
        "",
        _STRUCTS,
    ),
    Mutant(
        "C++ looks experts up in the tables from before a move",
        "engine_adapter/binding/bound_structs.py",
        "        self.binding.directory = now.directory_address\n",
        "",
        _STRUCTS,
    ),
    Mutant(
        "copies of a later layer move with matrices of the first",
        "engine_adapter/binding/bound_structs.py",
        "            matrix_of_copy += range(n_matrices, n_matrices + len(layer.copies))\n",
        "            matrix_of_copy += range(len(layer.copies))\n",
        _STRUCTS,
    ),
)

COMPUTE = (
    Mutant(
        "a move that failed is believed",
        "engine_adapter/binding/slab_compute.py",
        "            self._note_error(error)\n\n    def _tell",
        "            done[0] = abi.FILLED\n            self._note_error(error)\n\n    def _tell",
        _FAILED_MOVES,
    ),
    Mutant(
        "C++ is not told where a failed move has left the slots",
        "engine_adapter/binding/slab_compute.py",
        "                if not self._told:  # no move was needed, or it failed\n                    self._tell()\n",
        "                pass\n",
        _FAILED_MOVES,
    ),
    Mutant(
        "room counts as free while guards are not zeroed",
        "engine_adapter/binding/slab_compute.py",
        "manager.engine.compute_bytes * manager.engine.slots_are_sound",
        "manager.engine.compute_bytes",
        ("tests/engine_adapter/binding/test_moves_told.py",),
    ),
    Mutant(
        "the first layer that is foretold waits for every miss",
        "engine_adapter/binding/miss_costs.py",
        "1.0 if layer < counts.prefetch_layers else",
        "1.0 if layer <= counts.prefetch_layers else",
        ("tests/engine_adapter/binding/test_miss_costs.py",),
    ),
    Mutant(
        "a look-up that cannot be had keeps its kernels",
        "engine_adapter/binding/device_lookup.py",
        "        if lookup is not None:\n            lookup.close()\n",
        "",
        ("tests/engine_adapter/binding/test_device_lookup.py",),
    ),
    Mutant(
        "a name without a number has its kind's driver",
        "engine_adapter/placement/device_traits.py",
        "return row if row.driver is None or ordinal_of(name) is not None else row.without_driver()",
        "return row",
        ("tests/engine_adapter/placement/test_device_traits.py",),
    ),
    Mutant(
        "graphs are captured though llama.cpp is to do without",
        "engine_adapter/binding/device_lookup.py",
        "capture = traits.captures and traits.capture_off_variable not in environ",
        "capture = traits.captures",
        ("tests/engine_adapter/binding/test_device_lookup.py",),
    ),
)

FILES = (
    Mutant(
        "the engine's loader reads experts",
        "engine_adapter/llama_cpp/loader_view.py",
        "        extents.append(Extent(begin, end, EXPERTS, 0))\n",
        "        extents.append(Extent(begin, end, 0, begin))\n",
        ("tests/engine_adapter/llama_cpp/test_load.py",),
    ),
    Mutant(
        "the engine's loader reads experts of shards",
        "engine_adapter/llama_cpp/loader_view.py",
        "file = EXPERTS if tensor.name in experts else number",
        "file = number",
        ("tests/engine_adapter/llama_cpp/test_file_shards.py",),
    ),
    Mutant(
        "a skeleton of a changed model is used",
        "engine_adapter/llama_cpp/skeleton.py",
        'f"{file.path}|{file.identity}" for file in table.files',
        'f"{file.path}" for file in table.files',
        ("tests/engine_adapter/llama_cpp/test_skeleton.py",),
    ),
)

ADAPTER_MUTANTS = (*BINDING, *STRUCTS, *COMPUTE, *FILES)
