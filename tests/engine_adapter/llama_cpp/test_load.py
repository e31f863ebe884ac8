"""Loading reads everything but the experts, by the kernel's count and by the loader's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_runs.tiered_runs import make_tiers, write_small_model
from expertier.engine_adapter.llama_cpp import LlamaModel
from expertier.engine_adapter.placement.override_pattern import experts_regex
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet
from expertier.units import KIB


def bytes_read_by_this_process() -> int:
    """Bytes of all read calls of this process, cached or not (rchar)."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


@pytest.mark.parametrize("kind", ["F32", "Q4_K+Q6_K"])
def test_expert_spans_are_not_read(loaded_engine, tmp_path, kind):
    path = write_small_model(tmp_path, kind)
    with make_tiers(path, 1) as tiers:
        LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)).close()  # first use reads code of ours
        before = bytes_read_by_this_process()
        with LlamaModel.open(loaded_engine, path, tiers=TierSet.of(tiers)) as model:
            read = bytes_read_by_this_process() - before
            counts = model.load_counts()
            dropped = model.binding.counters().dropped_writes
        table = tiers.table
        assert tiers.stats().file.bytes_read == 0
    others = table.file_bytes - table.expert_bytes_total
    assert counts.expert_bytes == 0
    assert counts.bytes_read <= read <= others + 256 * KIB
    assert counts.bytes_read >= others - 64 * KIB, "everything else was read"
    assert dropped == table.expert_bytes_total


def test_the_override_pattern_matches_expert_tensors_only(tmp_path):
    import re

    table = ExpertTable.from_gguf(write_small_model(tmp_path, "F32"))
    pattern = re.compile(experts_regex(table))
    for layer in table.layers:
        for matrix in layer.matrices:
            assert pattern.search(matrix.name)
    for name in ("blk.0.ffn_gate_exps.bias", "blk.0.ffn_gate_inp.weight", "xblk.0.ffn_up_exps.weight"):
        assert not pattern.search(name)
