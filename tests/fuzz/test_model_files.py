"""Files that a stranger gives us: almost good models with something odd in them, by the rules of fuzz_rules."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFValueType
from hypothesis import event, given
from hypothesis import strategies as st

from expertier.errors import ModelError
from expertier.tiers.model.table import ExpertTable
from model_files.fuzz_rules import check_skeleton, read_by_the_rules
from model_files.raw_gguf import RawGguf, RawTensor, RawValue, good_model, scalar, split, text, write_files

EDGES = (0, 1, 2, 3, 4, 5, 8, 31, 32, 33, 64, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 32)
HUGE = (1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, (1 << 64) - 32, (1 << 64) - 1)
WHOLE_KINDS = (
    *(GGUFValueType.UINT8, GGUFValueType.INT8, GGUFValueType.UINT16, GGUFValueType.INT16),
    *(GGUFValueType.UINT32, GGUFValueType.INT32, GGUFValueType.UINT64, GGUFValueType.INT64),
)
NAMES = tuple(
    name.encode()
    for name in (
        *(f"blk.{block}.ffn_{role}_exps.weight" for block in (0, 1, 7) for role in ("gate", "up", "down", "gate_up")),
        *("blk.00.ffn_up_exps.weight", "blk.٣.ffn_up_exps.weight", "blk.-1.ffn_up_exps.weight"),
        *("blk.0.ffn_up_exps.bias", "blk.0.ffn_gate.0.weight", "x_exps.weight", ""),
        *("token_embd.weight", "\x1b[2J", "blk." + "9" * 900),
        *(f"blk.{'9' * 5000}.ffn_up_exps.weight", "ü" * 600),
    )
)  # fmt: skip
KEYS = (
    *(
        b"general.architecture",
        b"general.alignment",
        b"qwen3moe.expert_used_count",
        b"GGUF.kv_count",
        b"GGUF.version",
    ),
    *(b"split.no", b"split.count", b"split.tensors.count", b"general.name", b"", b"\xff\xfe", b"k" * 70_000),
)

numbers = st.sampled_from(EDGES) | st.sampled_from(HUGE) | st.integers(0, (1 << 64) - 1)
small = st.integers(0, 40)
odd_bytes = st.binary(max_size=24) | st.text(max_size=12).map(str.encode) | st.just(b"\xed\xa0\x80\xc3")
names = st.sampled_from(NAMES) | odd_bytes
keys = st.sampled_from(KEYS) | odd_bytes
kinds = st.sampled_from([int(kind) for kind in GGMLQuantizationType]) | st.sampled_from(
    [4, 5, 250, (1 << 32) - 1]
)


def _array(items: tuple[int, int, bytes]) -> bytes:
    item_kind, count, data = items
    return struct.pack("<IQ", item_kind, count) + data


whole_numbers = st.builds(
    lambda kind, number: (kind, scalar(kind, number % 128)), st.sampled_from(WHOLE_KINDS), numbers
)
arrays = st.tuples(st.integers(0, 13), small | numbers, st.binary(max_size=64)).map(_array)
arrays_of_arrays = st.lists(arrays, max_size=3).map(
    lambda parts: struct.pack("<IQ", GGUFValueType.ARRAY, len(parts)) + b"".join(parts)
)
payloads = st.one_of(
    whole_numbers,
    st.tuples(st.just(8), odd_bytes.map(text)),
    st.tuples(st.just(8), st.builds(text, odd_bytes, numbers)),
    st.tuples(st.just(8), st.integers(1000, 5000).map(lambda n: text(b"\xf0\x9f\x90\xb8" * n))),
    st.tuples(st.just(9), arrays | arrays_of_arrays),
    st.tuples(st.integers(0, 14), st.binary(max_size=16)),
)
values = st.builds(lambda key, payload: RawValue(key, *payload), keys, payloads)


@st.composite
def changed_tensor(draw: st.DrawFn, tensor: RawTensor) -> RawTensor:
    """The tensor with one field changed."""
    changed = RawTensor(tensor.name, list(tensor.dims), tensor.kind, tensor.offset)
    match draw(st.sampled_from(["name", "dims", "dim", "kind", "offset", "n_dims"])):
        case "name":
            changed.name = draw(names)
        case "dims":
            changed.dims = draw(st.lists(small | numbers, max_size=6))
        case "dim":
            changed.dims[draw(st.integers(0, len(tensor.dims) - 1))] = draw(small | numbers)
        case "kind":
            changed.kind = draw(kinds)
        case "offset":
            changed.offset = draw(st.integers(0, 200).map(lambda n: 32 * n) | numbers)
        case "n_dims":
            changed.n_dims = draw(st.sampled_from([0, 1, 4, 5, 1 << 16, (1 << 32) - 1]))
    return changed


@st.composite
def almost_good(draw: st.DrawFn, base: RawGguf) -> bytes:
    """The file with up to two things changed, then perhaps some of its bytes."""
    raw = RawGguf(list(base.values), list(base.tensors), alignment=base.alignment)
    raw.data_bytes = max((tensor.offset + tensor.n_bytes for tensor in raw.tensors), default=0)
    for what in draw(st.lists(st.sampled_from(CHANGES), max_size=2)):
        at = draw(st.integers(0, 1 << 16))
        match what:
            case "tensor" if raw.tensors:
                at %= len(raw.tensors)
                if raw.tensors[at].dims:
                    raw.tensors[at] = draw(changed_tensor(raw.tensors[at]))
            case "tensor again" if raw.tensors:
                raw.tensors.append(raw.tensors[at % len(raw.tensors)])
            case "tensor gone" if raw.tensors:
                del raw.tensors[at % len(raw.tensors)]
            case "value":
                raw.values.insert(at % (len(raw.values) + 1), draw(values))
            case "value replaced" if raw.values:
                kind, payload = draw(payloads)
                raw.values[at % len(raw.values)] = RawValue(
                    raw.values[at % len(raw.values)].key, kind, payload
                )
            case "split":
                key = draw(st.sampled_from([b"split.count", b"split.no", b"split.tensors.count"]))
                raw.values = [value for value in raw.values if value.key != key]
                raw.values.append(RawValue(key, *draw(whole_numbers | payloads)))
            case "alignment":
                raw.set_number("general.alignment", draw(numbers) & 0xFFFFFFFF)
            case "n_values":
                raw.n_values = draw(small | numbers)
            case "n_tensors":
                raw.n_tensors = draw(small | numbers)
            case "version":
                raw.version = draw(st.sampled_from([0, 1, 2, 3, 4, 0x03000000, (1 << 32) - 1]))
            case "data":
                raw.data_bytes = draw(st.integers(0, 1 << 14))
    data = bytearray(raw.encode())
    if draw(st.integers(0, 3)) == 0:
        at, new = draw(st.tuples(st.integers(0, 1 << 13), st.binary(min_size=1, max_size=8)))
        at %= len(data)
        data[at : at + len(new)] = new
    if draw(st.integers(0, 9)) == 0:
        del data[draw(st.integers(0, len(data))) :]
    return bytes(data)


CHANGES = (
    *("tensor", "tensor", "tensor", "tensor again", "tensor gone", "value", "value", "value replaced"),
    *("split", "alignment", "n_values", "n_tensors", "version", "data"),
)
BASES = (good_model(), good_model(1, ("gate_up", "down")), good_model(1, ("up", "down")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    path = write_files(folder, [good_model().encode()])
    read_by_the_rules(path, 1 << 30)  # what is made once, such as patterns, is not counted below
    return folder


def read(folder: Path, *contents: bytes) -> ExpertTable | ModelError:
    """Read a model of these files by the rules, and have Hypothesis count what became of it."""
    outcome = read_by_the_rules(write_files(folder, contents), sum(map(len, contents)))
    event(type(outcome).__name__)
    if isinstance(outcome, ExpertTable):
        (folder / "skeleton").mkdir(exist_ok=True)
        check_skeleton(outcome, folder / "skeleton")
    return outcome


@pytest.mark.parametrize("n_shards", [1, 2, 3])
@pytest.mark.parametrize("number", range(len(BASES)))
def test_the_bases_are_good(folder: Path, number: int, n_shards: int) -> None:
    base = BASES[number]
    files = [base] if n_shards == 1 else split(base, n_shards)
    contents = [file.encode() for file in files]
    table = read_by_the_rules(write_files(folder, contents), sum(map(len, contents)))
    assert isinstance(table, ExpertTable)
    assert len(table.files) == n_shards


@given(data=st.data())
def test_one_file(folder: Path, data: st.DataObject) -> None:
    read(folder, data.draw(st.sampled_from(BASES).flatmap(almost_good)))


@given(data=st.data())
def test_file_shards(folder: Path, data: st.DataObject) -> None:
    shards = split(data.draw(st.sampled_from(BASES)), data.draw(st.integers(2, 3)))
    changed = data.draw(st.integers(0, len(shards) - 1))
    contents = [shard.encode() for shard in shards]
    contents[changed] = data.draw(almost_good(shards[changed]))
    read(folder, *contents)


@given(
    start=st.sampled_from([b"", b"GGUF", b"GGUF\x03\0\0\0", good_model().header()[:200]]),
    rest=st.binary(max_size=300),
)
def test_any_bytes(folder: Path, start: bytes, rest: bytes) -> None:
    assert isinstance(read(folder, start + rest), ModelError)
