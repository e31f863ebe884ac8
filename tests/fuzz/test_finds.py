"""What fuzzing found, or reading the code for it: each was a crash, a hang, a large allocation or a wrong refusal."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest
from gguf import GGUFValueType

from expertier.engine_adapter.build.cache import CACHE_VARIABLE
from expertier.engine_adapter.llama_cpp.loader_view import loader_view
from expertier.engine_adapter.llama_cpp.skeleton import ensure_skeleton
from expertier.errors import (
    BuildError,
    ConfigError,
    ModelError,
    NotGgufError,
    SourceError,
    TruncatedModelError,
    UnsupportedLayoutError,
)
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model import gguf_header
from expertier.tiers.model.table import ExpertTable
from expertier.units import GIB, KIB, MIB
from model_files.fuzz_rules import bounded, check_table, read_by_the_rules
from model_files.gguf_files import Block, write_model
from model_files.raw_gguf import RawTensor, RawValue, expert_tensors, good_model, split, table_of, write_files


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


# ---- found by the coverage-guided fuzzer


def test_a_string_that_is_no_utf8(tmp_path: Path) -> None:
    """Was a UnicodeDecodeError. The engine does not look at such a string either, so the model stays usable."""
    model = good_model()
    model.set_text("general.name", b"Mod\xe8le")
    assert table_of(tmp_path, model.encode()).n_layers == 2


def test_an_architecture_that_is_no_utf8(tmp_path: Path) -> None:
    """Was a UnicodeDecodeError: its key for the experts used is then not found."""
    damaged = good_model().encode().replace(b"qwen3moe", b"qw\xe4n3moe", 1)
    with pytest.raises(UnsupportedLayoutError, match=r"qw\ufffdn3moe\.expert_used_count is None"):
        table_of(tmp_path, damaged)


def test_a_tensor_of_unknown_size_in_a_shard(tmp_path: Path) -> None:
    """Was an AssertionError while loading."""
    shards = split(good_model(), 2)
    shards[0].tensors[0].kind = 250
    contents = [shard.encode() if i else _with_data(shard.header(), 4096) for i, shard in enumerate(shards)]
    table = table_of(tmp_path, *contents)
    with pytest.raises(
        UnsupportedLayoutError, match=r"token_embd\.weight of shape \[8, 3\] has the ggml type 250"
    ):
        loader_view(table)


def _with_data(header: bytes, n_bytes: int) -> bytes:
    return header + bytes(n_bytes)


# ---- found while the generators were written


@pytest.mark.parametrize("digits", [20, 900, 5000])
def test_a_block_number_of_many_digits(tmp_path: Path, digits: int) -> None:
    """Was a ValueError of int() from 4301 digits on."""
    model = good_model()
    model.tensors.append(RawTensor(b"blk." + b"9" * digits + b".ffn_up_exps.weight", [32, 2, 4], 8))
    model.place()
    with pytest.raises((UnsupportedLayoutError, NotGgufError), match=r"unknown layout|a name of 5023 bytes"):
        table_of(tmp_path, model.encode())


@pytest.mark.parametrize("block", ["00", "\N{ARABIC-INDIC DIGIT ZERO}", "0000"])
def test_two_names_for_one_block(tmp_path: Path, block: str) -> None:
    """Was accepted: the second tensor took the place of the first, which the engine would have loaded whole."""
    model = good_model(1)
    model.tensors.append(RawTensor(f"blk.{block}.ffn_up_exps.weight".encode(), [32, 2, 4], 8))
    model.place()
    with pytest.raises(UnsupportedLayoutError, match="unknown layout"):
        table_of(tmp_path, model.encode())


@pytest.mark.parametrize("begin", [0, 4 * GIB, 1 << 40])
def test_a_given_alignment_and_data_beyond_4_gib(tmp_path: Path, begin: int) -> None:
    """Was refused as damaged, whatever it was: the offset was divided by a number of 32 bits."""
    model = good_model(1)
    model.set_number("general.alignment", 64)
    model.alignment = 64
    model.place()
    for tensor in model.tensors:
        tensor.offset += begin
    header = model.header()
    path = tmp_path / "large.gguf"
    path.write_bytes(header)
    os.truncate(path, len(header) + begin + 4096)  # a hole
    table = ExpertTable.from_gguf(path)
    check_table(table)
    assert table.expert_ranges[0][0] >= begin


@pytest.mark.parametrize("alignment", [2 * MIB, 1 << 31])
def test_a_huge_alignment_in_a_shard_without_tensors(tmp_path: Path, alignment: int) -> None:
    """Allocated 2 GiB for the merged header: nothing else bounds the alignment of a shard without data."""
    shards = split(good_model(), 2)
    shards[1].tensors += shards[0].tensors
    shards[0].tensors = []
    shards[1].place()
    shards[0].set_number("general.alignment", alignment)
    contents = [shard.encode() for shard in shards]
    outcome = read_by_the_rules(write_files(tmp_path, contents), sum(map(len, contents)))
    assert isinstance(outcome, NotGgufError)
    assert f"its alignment is {alignment}" in str(outcome)


def test_a_pipe(tmp_path: Path) -> None:
    """Waited for a writer, for ever."""
    os.mkfifo(tmp_path / "model.gguf")
    with bounded(0), pytest.raises(NotGgufError, match="is no file"):
        ExpertTable.from_gguf(tmp_path / "model.gguf")


def test_a_device() -> None:
    with bounded(0), pytest.raises(NotGgufError, match="is no file"):
        ExpertTable.from_gguf("/dev/zero")


@pytest.mark.parametrize(
    ("n_tensors", "room", "message"),
    [(1 << 13, 5 * MIB, "no expert tensors"), ((1 << 16) + 1, 0, "at most 65536 and 16384 are read")],
)
def test_many_small_tensors(tmp_path: Path, n_tensors: int, room: int, message: str) -> None:
    """Took some kilobytes of memory for each 40 bytes of the file."""
    start = b"GGUF" + struct.pack("<IQQ", 3, n_tensors, 0)
    entries = (struct.pack("<Q8sIQIQ", 8, b"%08x" % i, 1, 1, 250, 0) for i in range(n_tensors))
    path = write_files(tmp_path, [start + b"".join(entries) + bytes(64)])
    with bounded(room), pytest.raises(ModelError, match=message):
        ExpertTable.from_gguf(path)


@pytest.mark.parametrize("where", ["architecture", "tensor"])
@pytest.mark.parametrize("text", ["\x1b[2J", "\x9b2J", "\n"])
def test_text_that_a_terminal_would_obey(tmp_path: Path, where: str, text: str) -> None:
    """Went to the terminal as it was."""
    model = good_model()
    if where == "tensor":
        model.tensors[0].name = f"x{text}_exps.weight".encode()
    else:
        model.values = []
        model.set_text("general.architecture", text.encode())
    with pytest.raises(NotGgufError) as caught:
        table_of(tmp_path, model.encode())
    assert str(caught.value).isprintable()
    assert repr(text)[1:-1] in str(caught.value)


def test_long_strings(tmp_path: Path) -> None:
    """Took six times their size."""
    model = good_model()
    model.set_text("tokenizer.chat_template", "\N{PANDA FACE}".encode() + b"x" * (8 * MIB))
    data = model.encode()
    with bounded(0):
        assert write_files(tmp_path, [data])
        del data
        assert ExpertTable.from_gguf(tmp_path / "model.gguf").n_layers == 2


@pytest.mark.parametrize("what", ["key", "tensor"])
def test_long_names(tmp_path: Path, what: str) -> None:
    model = good_model()
    if what == "key":
        model.set_number("k" * 1025, 1)
    else:
        model.tensors[0].name = b"t" * 1025
    with pytest.raises(NotGgufError, match="a name of 1025 bytes"):
        table_of(tmp_path, model.encode())


def test_a_variable_as_long_as_the_kernel_takes() -> None:
    """The message repeated all of it."""
    with pytest.raises(ConfigError, match=r"MOE_POLICY='l{100}'\.\.\. cannot be read") as caught:
        TierConfig.from_env(environ={"MOE_POLICY": "l" * (128 << 10)})
    assert len(str(caught.value)) < 300


# ---- a file that changes while its header is read


@pytest.mark.parametrize("left", [100, 0])
def test_cut_while_its_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """Was a SIGBUS, which no program survives: the header was read from a map of the file."""
    model = good_model()
    model.set_text("some.text", b"x" * 200_000)
    model.values.reverse()
    path = write_files(tmp_path, [model.encode()])
    build = gguf_header._CheckedReader._build_fields

    def cut_first(self: gguf_header._CheckedReader, offs: int, count: int) -> int:
        os.truncate(path, left)
        return build(self, offs, count)

    monkeypatch.setattr(gguf_header._CheckedReader, "_build_fields", cut_first)
    with pytest.raises(TruncatedModelError, match="was cut while its header was read"):
        ExpertTable.from_gguf(path)


@pytest.mark.parametrize("change", ["replaced", "grown", "touched", "gone"])
def test_changed_while_its_header_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = write_files(tmp_path, [good_model().encode()])
    build = gguf_header._CheckedReader._build_fields

    def change_first(self: gguf_header._CheckedReader, offs: int, count: int) -> int:
        data = path.read_bytes()
        if change == "replaced":
            (tmp_path / "new").write_bytes(data)
            (tmp_path / "new").replace(path)
        elif change == "grown":
            path.write_bytes(data + b"x")
        elif change == "touched":
            os.utime(path, ns=(1, 1))
        else:
            path.unlink()
        return build(self, offs, count)

    monkeypatch.setattr(gguf_header._CheckedReader, "_build_fields", change_first)
    match = {
        "replaced": "changed while its header was read: another file took its place",
        "grown": "changed while its header was read: its size was",
        "touched": "changed while its header was read: it was written to",
        "gone": "cannot be read: No such file",
    }[change]
    with pytest.raises(NotGgufError, match=match):
        ExpertTable.from_gguf(path)


def test_shards_that_changed_before_they_are_shown(tmp_path: Path) -> None:
    """The view was made of whatever lay there then."""
    table = table_of(tmp_path, *(shard.encode() for shard in split(good_model(), 2)))
    os.utime(table.files[1].path, ns=(1, 1))
    with pytest.raises(ModelError, match="changed after the table was read"):
        loader_view(table)


# ---- skeletons


@pytest.mark.usefixtures("cache")
def test_a_skeleton_of_a_name_that_is_no_utf8(tmp_path: Path) -> None:
    """Was a UnicodeEncodeError."""
    path = tmp_path / os.fsdecode(b"mod\xe8le.gguf")
    write_model(tmp_path / "model.gguf", [Block(n_experts=64, n_embd=256)]).path.rename(path)
    skeleton = ensure_skeleton(ExpertTable.from_gguf(path))
    assert skeleton.name == path.name
    os.utime(path, ns=(1, 1))
    assert ensure_skeleton(ExpertTable.from_gguf(path)) != skeleton


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("n_shards", [1, 3])
def test_a_skeleton_whose_model_is_gone_or_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_shards: int
) -> None:
    """Was an OSError."""
    model = good_model()
    files = split(model, n_shards) if n_shards > 1 else [model]
    table = table_of(tmp_path, *(file.encode() for file in files))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", _failing(errno.EIO))
        with pytest.raises(SourceError, match="Input/output error; check the disk"):
            ensure_skeleton(table)
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", _failing(errno.EACCES))
        with pytest.raises(SourceError, match="cannot be opened: Permission denied"):
            _copy(table, tmp_path)
    table.files[-1].path.unlink()
    with pytest.raises(SourceError, match="cannot be opened: No such file"):
        ensure_skeleton(table)


def test_a_skeleton_that_does_not_fit(tmp_path: Path) -> None:
    """Was an OSError."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    table = table_of(tmp_path, good_model().encode())
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "model.gguf").symlink_to("/dev/full")
    with pytest.raises(BuildError, match="No space left on device; make room, or set EXPERTIER_CACHE_DIR"):
        _copy(table, tmp_path / "to")


def _failing(number: int):
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def _copy(table: ExpertTable, folder: Path) -> None:
    from expertier.engine_adapter.llama_cpp import skeleton

    skeleton._copy_without_experts(table, table.files[0], folder / "model.gguf")


def test_kinds_of_numbers_in_split_keys(tmp_path: Path) -> None:
    """Not a find: floats, booleans and strings there are refused by name, negative numbers mean one file."""
    for kind, value in (
        (GGUFValueType.FLOAT32, 2.0),
        (GGUFValueType.BOOL, True),
        (GGUFValueType.FLOAT64, 1e300),
    ):
        model = good_model()
        model.set_number("split.count", value, kind)
        with pytest.raises(ModelError, match="a whole number is needed"):
            table_of(tmp_path, model.encode())
    model = good_model()
    model.set_number("split.count", -(1 << 63), GGUFValueType.INT64)
    assert len(table_of(tmp_path, model.encode()).files) == 1


def test_experts_of_several_blocks_may_share_no_byte(tmp_path: Path) -> None:
    """Not a find: overlapping experts are refused."""
    model = good_model(1)
    model.tensors += expert_tensors(1)
    for tensor in model.tensors[-3:]:
        tensor.offset = model.tensors[-4].offset
    with pytest.raises(NotGgufError, match="begins within"):
        table_of(tmp_path, model.encode())


# ---- found by a day of hostile use: files whose header claims more than there is on disk


def sparse(path: Path, header: bytes, n_bytes: int) -> Path:
    """A file with this beginning whose other bytes are a hole."""
    path.write_bytes(header)
    os.truncate(path, n_bytes)
    assert path.stat().st_blocks * 512 <= len(header) + 64 * KIB
    return path


def array(kind: GGUFValueType, n_items: int) -> bytes:
    return struct.pack("<IQ", kind, n_items)


def with_array(kind: GGUFValueType, n_items: int) -> bytes:
    """A good header, and at its end an array that goes on in what follows."""
    model = good_model(1)
    model.tensors.clear()
    model.values.append(RawValue(b"tokens", GGUFValueType.ARRAY, array(kind, n_items)))
    start = struct.pack("<IQQ", 3, 1, len(model.values) + 1)
    return b"GGUF" + start + b"".join(value.encode() for value in model.values)


@pytest.mark.parametrize("n_bytes", [1 * GIB, 100 * GIB])
def test_empty_strings_in_a_hole(tmp_path: Path, n_bytes: int) -> None:
    """Read one after another: 6 s for a file of 1 GiB, of which 4 KiB were on disk; an hour for 100 GiB."""
    header = with_array(GGUFValueType.STRING, (n_bytes - 4096) // 8)
    path = sparse(tmp_path / "m.gguf", header, n_bytes)
    with bounded(0), pytest.raises(TruncatedModelError, match="on disk, the rest are holes"):
        ExpertTable.from_gguf(path)


def test_numbers_in_a_hole_that_shards_would_copy(tmp_path: Path) -> None:
    """The merged header of shards would have had all of them in memory."""
    path = sparse(tmp_path / "m.gguf", with_array(GGUFValueType.UINT8, 64 * GIB), 65 * GIB)
    with bounded(0), pytest.raises(TruncatedModelError, match="on disk, the rest are holes"):
        ExpertTable.from_gguf(path)


def test_arrays_that_share_what_is_on_disk(tmp_path: Path) -> None:
    """Each array alone has no more strings than there are bytes on disk; all of them have."""
    n_arrays, n_items = 60, 4096
    step = 4096 + 8 * n_items
    path = tmp_path / "m.gguf"
    with open(path, "wb") as file:
        begin = 0
        head = b"GGUF" + struct.pack("<IQQ", 3, 1, n_arrays)
        for i in range(n_arrays):
            key = RawValue(b"k%d" % i, GGUFValueType.ARRAY, array(GGUFValueType.STRING, n_items)).encode()
            data = head + key if i == 0 else key
            file.seek(begin)
            file.write(data)
            begin += len(data) + 8 * n_items
        file.truncate(begin + step)
    on_disk = path.stat().st_blocks * 512
    assert n_arrays * n_items * 8 > 4 * on_disk
    with bounded(0), pytest.raises(TruncatedModelError, match="on disk, the rest are holes"):
        ExpertTable.from_gguf(path)


def test_a_count_of_tensors_in_a_hole(tmp_path: Path) -> None:
    path = sparse(tmp_path / "m.gguf", b"GGUF" + struct.pack("<IQQ", 3, 60_000, 16_000), 100 * GIB)
    with bounded(0), pytest.raises(ModelError):
        ExpertTable.from_gguf(path)


def test_more_strings_than_any_model_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may even be on disk: a file of 100 GiB of zeros is."""
    monkeypatch.setattr(gguf_header, "_MAX_STRINGS", 1000)
    path = tmp_path / "m.gguf"
    path.write_bytes(with_array(GGUFValueType.STRING, 1001) + bytes(10_000))
    with pytest.raises(NotGgufError, match="at most 1000 are read"):
        ExpertTable.from_gguf(path)


def test_a_model_that_was_copied_with_holes(tmp_path: Path) -> None:
    """`cp --sparse` makes one of every page of zeros, in the header as well."""
    model = good_model()
    scores = struct.pack("<f", 0.0) * (64 * KIB)
    model.values.append(
        RawValue(b"scores", GGUFValueType.ARRAY, array(GGUFValueType.FLOAT32, 64 * KIB) + scores)
    )
    whole = model.header() + os.urandom(512 * KIB)
    path = tmp_path / "m.gguf"
    with open(path, "wb") as file:
        for begin in range(0, len(whole), 4096):
            if any(page := whole[begin : begin + 4096]):
                file.seek(begin)
                file.write(page)
    assert path.stat().st_blocks * 512 < len(whole) - 200 * KIB
    assert ExpertTable.from_gguf(path).n_layers == 2


def test_a_file_system_that_knows_of_no_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "lseek", refuse)
    assert table_of(tmp_path, good_model().encode()).n_layers == 2
