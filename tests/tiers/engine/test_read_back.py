"""Pieces of a matrix of all experts, for an engine that reads back what lies in the tiers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertier.errors import SourceError
from expertier.hip.host import HostDevice
from expertier.tiers.config.config import TierConfig
from expertier.tiers.engine.read_back import read_matrix
from expertier.tiers.manager import TierManager
from expertier.tiers.model.span import Span
from model_files.gguf_files import Block, BytesSource, ModelFile, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    blocks = [Block(n_experts=5), Block(n_experts=3, types=("Q8_0", "Q4_0", "Q8_0"))]
    return write_model(tmp_path_factory.mktemp("read-back") / "m.gguf", blocks)


class WholeSource(BytesSource):
    """Gives whole spans of the table only, as a source of shards does."""

    def __init__(self, model: ModelFile) -> None:
        super().__init__(model.bytes)
        self._known = {
            span
            for layer, entry in enumerate(model.table.layers)
            for expert in range(entry.n_experts)
            for span in model.table.span(layer, expert)
        }

    def read_into(self, span: Span, buffer: memoryview) -> None:
        assert span in self._known, "a piece of an expert was asked for"
        super().read_into(span, buffer)


@given(data=st.data())
def test_any_piece_is_the_file_s(model: ModelFile, data: st.DataObject) -> None:
    layer = data.draw(st.sampled_from(model.table.layers))
    number = data.draw(st.integers(0, 2))
    matrix = layer.matrices[number]
    whole = layer.n_experts * matrix.expert_bytes
    begin = data.draw(st.integers(0, whole))
    end = data.draw(st.integers(begin, whole))
    found = bytearray(end - begin)
    read_matrix(WholeSource(model), layer, number, begin, memoryview(found))
    assert bytes(found) == model.bytes[matrix.file_offset + begin : matrix.file_offset + end]


@pytest.mark.parametrize(("offset", "n_bytes"), [(-1, 1), (0, 1 << 20), (1 << 20, 0)])
def test_what_lies_outside(model: ModelFile, offset: int, n_bytes: int) -> None:
    layer = model.table.layers[0]
    with pytest.raises(
        IndexError, match=r"asked for the bytes .* of blk\.0\.ffn_gate_exps\.weight, which has"
    ):
        read_matrix(WholeSource(model), layer, 0, offset, memoryview(bytearray(n_bytes)))


def test_a_manager_reads_past_its_slots_and_keeps_what_went_wrong(model: ModelFile) -> None:
    class Failing(BytesSource):
        def read_into(self, span: Span, buffer: memoryview) -> None:
            raise SourceError(f"the disk is gone: {len(buffer)} bytes at {span.offset}")

    layer = model.table.layers[1]
    n_bytes = layer.n_experts * layer.matrices[0].expert_bytes
    config = TierConfig(expert_cache_bytes=1 << 20, host_pool_bytes=0)
    with HostDevice() as device:
        with TierManager(model.table, device=device, config=config) as tiers:
            tiers.engine.bind()
            found = bytearray(n_bytes)
            tiers.engine.read_back(1, 0, 0, memoryview(found))
            at = layer.matrices[0].file_offset
            assert bytes(found) == model.bytes[at : at + n_bytes]
            assert (tiers.stats().l1.misses, tiers.stats().l1.bytes_in) == (0, 0)
            tiers.engine.unbind()
            tiers.check_valid()
        with TierManager(model.table, device=device, config=config, source=Failing(b"")) as tiers:
            tiers.engine.bind()
            with pytest.raises(SourceError, match="the disk is gone"):
                tiers.engine.read_back(1, 0, 3, memoryview(bytearray(2)))
            assert isinstance(tiers.engine.last_error, SourceError)
            tiers.engine.unbind()
            tiers.check_valid()
