"""Small models of every architecture that the engine knows, made by the engine's own generator; and parity on each.

The generator is `tests/test-llama-archs.cpp` of the engine's source package. It is compiled against the headers of that
package, and run with the installed library, which exports what it uses.
"""

from __future__ import annotations

import ctypes as ct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from engine_runs.tiered_runs import make_tiers
from expertier.engine_adapter.build.compiler import find_compiler
from expertier.engine_adapter.build.headers import _check, _download
from expertier.engine_adapter.build.pins import EnginePin
from expertier.engine_adapter.llama_cpp import LlamaModel, LoadedEngine
from expertier.errors import ExpertierError
from expertier.tiers.model.table import ExpertTable
from expertier.tiers.tier_set import TierSet

GENERATOR = "tests/test-llama-archs.cpp"
_FOLDERS = ("include", "ggml/include", "ggml/src", "common", "src", "vendor")
_OWN_SOURCE = Path(__file__).with_suffix(".cpp")
_OLD_STRINGS = "_Z20llm_arch_from_stringRKSs"  # exported by an engine whose strings are as before C++11
_RUN = """
import ctypes as ct, sys
libraries, generator, folder = sys.argv[1].split(":"), sys.argv[2], sys.argv[3]
for library in libraries:
    ct.CDLL(library, mode=ct.RTLD_GLOBAL)
arguments = [b"generator", b"-s", b"1", b"-v", b"3", b"-o", folder.encode()]
sys.exit(ct.CDLL(generator).generate_models(len(arguments), (ct.c_char_p * len(arguments))(*arguments)))
"""
_TOKENS, _MORE_TOKENS = 40, 6
_N_VOCAB = 128  # of most of them; the others have more


def build_generator(pin: EnginePin, libraries: Sequence[Path], folder: Path) -> Path:
    """Return the generator as a library in `folder`, made the first time."""
    target = folder / f"generator-{pin.package}-{pin.version}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        archive = _download(pin, Path(fresh))
        _check(pin, archive)
        source = Path(fresh) / "source"
        _unpack(archive, pin.header_root, source)
        old_strings = any(
            hasattr(ct.CDLL(str(path), mode=ct.RTLD_GLOBAL), _OLD_STRINGS) for path in libraries
        )
        made = Path(fresh) / target.name
        includes = [part for name in _FOLDERS for part in ("-isystem", str(source / name))]
        command = [*find_compiler().command, "-std=c++17", "-O0", "-fPIC", "-shared"]
        command += [
            f"-D_GLIBCXX_USE_CXX11_ABI={int(not old_strings)}",
            *includes,
            "-I",
            str(source / "tests"),
        ]
        subprocess.run([*command, str(_OWN_SOURCE), "-o", str(made)], check=True, timeout=600)
        made.replace(target)
    return target


def _unpack(archive: Path, root: str, target: Path) -> None:
    """Write the generator and the headers that it may include below `target`."""
    with tarfile.open(archive, "r:gz") as package:
        for member in package:
            inside = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if not member.isfile() or not inside.is_relative_to(root):
                continue
            inside = inside.relative_to(root)
            is_header = inside.suffix in (".h", ".hpp") and any(
                inside.is_relative_to(name) for name in _FOLDERS
            )
            if is_header or str(inside) == GENERATOR:
                content = package.extractfile(member)
                assert content is not None
                (target / inside).parent.mkdir(parents=True, exist_ok=True)
                (target / inside).write_bytes(content.read())


def generate(generator: Path, libraries: Sequence[Path], folder: Path) -> list[Path]:
    """Make the models with experts in `folder`."""
    command = [sys.executable, "-c", _RUN, ":".join(map(str, libraries)), str(generator), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=900, check=False)
    assert done.returncode == 0, f"the engine's generator failed:\n{(done.stdout + done.stderr)[-4000:]}"
    for path in folder.glob("*-dense.gguf"):
        path.unlink()
    return sorted(folder.glob("*-moe.gguf"))


@dataclass(frozen=True)
class Setup:
    """What the process loads."""

    libraries: Sequence[Path]
    proxy: Path
    host: Path


@dataclass(frozen=True)
class Outcome:
    """What came of a model: why it was refused, if it was; what was wrong; with which numbers of slots it was run.

    `uses_experts` says whether the engine asked for any.
    """

    refusal: str = ""
    wrong: tuple[str, ...] = ()
    slots: tuple[int, ...] = ()
    uses_experts: bool = True


def try_model(setup: Setup, path: Path) -> Outcome:
    """Compare the logits of stock with those through tiers of 1, top-k and all slots, bit for bit."""
    engine = LoadedEngine.load(setup.libraries, setup.proxy, setup.host)
    try:
        table = ExpertTable.from_gguf(path)
    except ExpertierError as error:
        return Outcome(refusal=f"{type(error).__name__}: {error}")
    expected = _run(LlamaModel.open(engine, path, repack=False))
    wrong = [] if np.isfinite(expected).all() else ["stock's own logits are not finite"]
    if len(np.unique(expected)) < expected.size // 4:
        wrong.append("stock's logits are too much alike to show a difference")
    uses_experts = True
    counts = tuple(sorted({1, table.top_k, max(layer.n_experts for layer in table.layers)}))
    for n_slots in counts:
        try:
            found, bytes_read = _through_tiers(engine, path, n_slots)
        except ExpertierError as error:
            wrong.append(f"{n_slots} slots: {type(error).__name__}: {error}")
            continue
        uses_experts = bytes_read > 0
        if found.tobytes() != expected.tobytes():
            wrong.append(f"{n_slots} slots: {(found != expected).any(axis=1).sum()} rows of logits differ")
    return Outcome(wrong=tuple(wrong), slots=counts, uses_experts=uses_experts)


def _through_tiers(engine: LoadedEngine, path: Path, n_slots: int) -> tuple[np.ndarray, int]:
    """Return the logits, and how many bytes of experts were read for them."""
    with make_tiers(path, n_slots) as tiers:
        logits = _run(LlamaModel.open(engine, path, tiers=TierSet.of(tiers)))
        tiers.check_valid()
        return logits, tiers.stats().file.bytes_read


def _run(model: LlamaModel) -> np.ndarray:
    random = np.random.default_rng(5)
    prompt, more = random.integers(0, _N_VOCAB, _TOKENS).tolist(), random.integers(0, _N_VOCAB, _MORE_TOKENS)
    with model, model.context(n_ctx=128, n_ubatch=64, n_threads=1) as context:
        context.decode(prompt, 0, all_logits=True)
        rows = [context.logits(i) for i in range(_TOKENS)]
        for position, token in enumerate(more.tolist(), _TOKENS):
            context.decode([token], position)
            rows.append(context.logits())
        return np.stack(rows)
