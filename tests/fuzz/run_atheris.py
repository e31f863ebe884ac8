"""Fuzzes the reading of models, guided by coverage: `make fuzz SECONDS=60`.

Every input is a GGUF, or several ones after another that become shards. A find is an exception that is none of ours, or
a broken rule of `model_files.fuzz_rules` (in tests/support). Each find is saved under its own name in --finds, once for
each place in the code, and fuzzing goes on. The status is 1 if there was a find.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
import tracemalloc
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

with atheris.instrument_imports(
    include=["expertier.tiers", "expertier.engine_adapter.llama_cpp.loader_view", "gguf.gguf_reader"]
):
    from model_files.fuzz_rules import read_by_the_rules
    from model_files.raw_gguf import good_model, split, split_at_magic, write_files

from expertier.tiers.model.table import ExpertTable

MAX_SHARDS = 4
DICTIONARY = (
    *("GGUF", "general.architecture", "general.alignment", "qwen3moe", "qwen3moe.expert_used_count"),
    *(
        "split.no",
        "split.count",
        "split.tensors.count",
        "blk.0.ffn_gate_exps.weight",
        "blk.1.ffn_up_exps.weight",
    ),
    *(
        "blk.0.ffn_down_exps.weight",
        "blk.0.ffn_gate_up_exps.weight",
        "blk.00.ffn_up_exps.weight",
        "exps.weight",
    ),
)
NUMBERS = (
    0,
    1,
    2,
    4,
    8,
    9,
    12,
    32,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)


NAME = re.compile(
    rb"blk\.\d{1,3}\.\w{1,30}\.weight|token_embd\.weight|(split|general|qwen3moe)\.[a-z_.]{1,30}"
)
FIELDS = (
    (-8, 8, True),
    (0, 4, False),
    (4, 8, False),
    (12, 8, False),
    (20, 8, False),
    (28, 4, False),
    (32, 8, False),
)
"""Numbers around a name: (offset from its begin or end, bytes, from its begin): its length, dimensions, type, place."""


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Change a number that belongs to a name, or leave it to libFuzzer."""
    chance = random.Random(seed)
    found = [match.span() for match in NAME.finditer(data)]
    if not found or chance.random() < 0.5:
        return bytes(atheris.Mutate(data, max_size))
    mutated = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        begin, end = chance.choice(found)
        offset, n_bytes, from_begin = chance.choice(FIELDS)
        at = (begin if from_begin else end) + offset
        if not 0 <= at <= len(data) - n_bytes:
            continue
        was = int.from_bytes(mutated[at : at + n_bytes], "little")
        number = chance.choice(
            [was + 1, was - 1, was * 2, was + 32, chance.randrange(40), 32 * chance.randrange(64)]
        )
        number = chance.choice(NUMBERS) if chance.random() < 0.4 else number
        mutated[at : at + n_bytes] = (number % (1 << 8 * n_bytes)).to_bytes(n_bytes, "little")
    return bytes(mutated[:max_size])


class Target:
    """What is fuzzed, with its counts."""

    def __init__(self, folder: Path, finds: Path) -> None:
        self.folder = folder
        self.finds = finds
        self.places: set[str] = set()
        self.executions = self.accepted = 0
        self.begin = time.monotonic()

    def __call__(self, data: bytes) -> None:
        """Read one input."""
        self.executions += 1
        contents = split_at_magic(data)[:MAX_SHARDS]
        path = write_files(self.folder, contents)
        try:
            outcome = read_by_the_rules(path, len(data))
        except Exception as error:
            self._note(error, data)
        else:
            self.accepted += isinstance(outcome, ExpertTable)

    def _note(self, error: Exception, data: bytes) -> None:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message = str(error).split(":")[0][:40] if frame.filename.endswith("fuzz_rules.py") else ""
        letters = "".join(filter(str.isalpha, message))
        place = f"{type(error).__name__} {Path(frame.filename).name}:{frame.lineno} {letters}".strip()
        if place in self.places:
            return
        self.places.add(place)
        target = self.finds / f"find-{len(self.places)}"
        target.write_bytes(data)
        print(f"FIND {place} after {self.executions}: {error!r:.300} -> {target}", flush=True)

    def counts(self) -> str:
        """As one line of JSON."""
        counts = {"executions": self.executions, "accepted": self.accepted, "finds": sorted(self.places)}
        return json.dumps({"seconds": round(time.monotonic() - self.begin), **counts})


def write_seeds(folder: Path) -> None:
    """Write small good models, of one file and of shards."""
    models = [good_model(), good_model(1), good_model(1, ("gate_up", "down")), good_model(1, ("up", "down"))]
    aligned = good_model(1)
    aligned.set_number("general.alignment", 32)
    seeds = [model.encode() for model in (*models, aligned)]
    seeds += [b"".join(shard.encode() for shard in split(model, n)) for model in models[:3] for n in (2, 3)]
    for number, seed in enumerate(seeds):
        (folder / f"seed-{number}").write_bytes(seed)


def write_dictionary(path: Path) -> None:
    """Write libFuzzer's dictionary: names, and numbers of 4 and 8 bytes."""
    entries = [word.encode() for word in DICTIONARY]
    entries += [len(word).to_bytes(8, "little") + word.encode() for word in DICTIONARY]
    entries += [number.to_bytes(8, "little") for number in NUMBERS]
    entries += [number.to_bytes(4, "little") for number in NUMBERS if number < 1 << 32]
    path.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in entry) + '"\n' for entry in entries))


def main() -> None:
    """Fuzz for a while, then say what was done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--finds", type=Path, default=Path("build/fuzz-finds"))
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers; 0: another each time")
    options = parser.parse_args()
    options.finds.mkdir(parents=True, exist_ok=True)
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    corpus, files = folder / "corpus", folder / "files"
    for each in (corpus, files):
        each.mkdir()
    write_seeds(corpus)
    write_dictionary(folder / "dictionary")
    target = Target(files, options.finds)
    tracemalloc.start()
    read_by_the_rules(
        write_files(files, [good_model().encode()]), 1 << 30
    )  # imports and caches are not counted
    pid = os.getpid()

    def finish() -> None:
        print(target.counts(), flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1 if target.places else 0)

    arguments = [
        sys.argv[0],
        f"-dict={folder / 'dictionary'}",
        "-max_len=16384",
        "-len_control=0",
        "-timeout=120",
        "-rss_limit_mb=2048",
        f"-seed={options.seed}",
        f"-artifact_prefix={options.finds}/",
        str(corpus),
    ]

    def test_one(data: bytes) -> None:
        target(data)
        if time.monotonic() - target.begin > options.seconds and os.getpid() == pid:
            finish()

    atheris.Setup(arguments, test_one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
