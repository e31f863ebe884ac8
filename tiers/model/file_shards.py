"""The files of a model: one GGUF, or several shards named `NAME-00001-of-0000N.gguf`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gguf import Keys

from expertier.errors import ModelError, UnsupportedLayoutError
from expertier.tiers.model.gguf_header import GgufHeader, read_header
from expertier.tiers.model.type_sizes import PACKAGE_TYPES, TypeSizes

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_COUNT, _NUMBER, _TENSORS = (
    Keys.Split.LLM_KV_SPLIT_COUNT,
    Keys.Split.LLM_KV_SPLIT_NO,
    Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT,
)


@dataclass(frozen=True, slots=True)
class FileShard:
    """One file of a model and its header; the first file's header describes the whole model."""

    path: Path
    header: GgufHeader


def read_file_shards(path: Path, type_sizes: TypeSizes = PACKAGE_TYPES) -> tuple[FileShard, ...]:
    """Return all files of the model at `path`, which may be any of its shards; the first shard comes first.

    Raises the same errors as `read_header`, and `UnsupportedLayoutError` where a shard is missing or belongs to another
    model; the message names the shard.
    """
    header = read_header(path, type_sizes)
    count = _integer(header, _COUNT, 1)
    if count <= 1:
        return (FileShard(path, header),)
    found = _NAME.fullmatch(path.name)
    if found is None or int(found["count"]) != count:
        raise UnsupportedLayoutError(
            f"{path} is one of {count} shards ({_COUNT}), but its name does not say so: name the shards "
            f"NAME-00001-of-{count:05d}.gguf to NAME-{count:05d}-of-{count:05d}.gguf in one folder"
        )
    names = [f"{found['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    shards = tuple(_read_file_shard(path.with_name(name), path, type_sizes) for name in names)
    for number, shard in enumerate(shards):
        _require_same_model(shard, number, shards[0])
    n_tensors = sum(len(shard.header.tensors) for shard in shards)
    expected = _integer(shards[0].header, _TENSORS, n_tensors)
    if n_tensors != expected:
        raise UnsupportedLayoutError(
            f"{shards[0].path} and its {count - 1} other shards hold {n_tensors} tensors, {_TENSORS} says {expected}: "
            "one of them is of another model; download them again"
        )
    return shards


def _read_file_shard(path: Path, asked: Path, type_sizes: TypeSizes) -> FileShard:
    if not path.exists():
        raise UnsupportedLayoutError(
            f"{asked} is a shard of a model of which {path.name} is missing: put all of its shards into "
            f"{path.parent}"
        )
    return FileShard(path, read_header(path, type_sizes))


def _require_same_model(shard: FileShard, number: int, first: FileShard) -> None:
    for key, wanted in (
        (_COUNT, _integer(first.header, _COUNT, 1)),
        (_NUMBER, number),
        (_TENSORS, _integer(first.header, _TENSORS, -1)),
    ):
        found = _integer(shard.header, key, -1)
        if found != wanted:
            raise UnsupportedLayoutError(
                f"{shard.path} is not shard {number + 1} of {first.path}: its {key} is {found}, {wanted} is needed; "
                "download it again"
            )


def _integer(header: GgufHeader, key: str, default: int) -> int:
    value = header.values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{key} is {value!r}; a whole number is needed: convert the model again")
    return value
