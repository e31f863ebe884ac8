"""Whole commands, each a process, on disks that are full, folders that are read-only, pipes that nobody reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from failures.failing_targets import full_disk, mounted, read_only
from servers.commands import Ended

pytestmark = pytest.mark.deep


@pytest.fixture
def recording(tmp_path):
    """Some steps of routing."""
    rng = np.random.default_rng(0)
    ids = np.stack([[rng.permutation(16)[:2] for _ in range(2)] for _ in range(8)]).astype(np.int32)
    np.savez(tmp_path / "ids.npz", ids=ids)
    return tmp_path / "ids.npz"


def process(*arguments: object, env: dict[str, str], stdout: int = subprocess.PIPE) -> Ended:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MOE_")}
    done = subprocess.run(
        [*map(str, arguments)],
        env={**inherited, "NO_COLOR": "1", **env},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    return Ended(done.returncode, done.stdout or "", done.stderr)


OURS = (sys.executable, "-m", "expertier")


@pytest.mark.parametrize("target", [full_disk, read_only], ids=lambda target: target.__name__)
@pytest.mark.parametrize("what", ["run", "synth", "profile", "probe", "demo", "engine", "probe's models"])
def test_an_output(tiny, recording, ready_cache, tmp_path, what, target):
    (tmp_path / "to").mkdir()
    with target(tmp_path / "to") as place:
        cache, there = {"EXPERTIER_CACHE_DIR": ready_cache}, {"EXPERTIER_CACHE_DIR": str(place)}
        ended = {
            "run": lambda: process(
                *OURS,
                "run",
                tiny,
                "-p",
                "some words",
                "-n",
                2,
                "-t",
                1,
                "--record-routing",
                place / "r",
                env=cache,
            ),
            "synth": lambda: process(*OURS, "synth", "--trace", recording, "-o", place / "m", env=cache),
            "profile": lambda: process(*OURS, "profile", "make", recording, "-o", place / "p", env=cache),
            "probe": lambda: process(*OURS, "probe", "--no-engine", env=there),
            "demo": lambda: process(*OURS, "demo", env={**cache, "TMPDIR": str(place)}),
            "engine": lambda: process(*OURS, "engine", "build", env=there),
            "probe's models": lambda: process(
                *OURS, "probe", tiny, "--again", "-t", 1, env={**cache, "TMPDIR": str(place)}
            ),
        }[what]()
        ended.must_fail(place)  # `run` has printed its text by then


@pytest.mark.parametrize("n_bytes", [1 << 10, 64 << 10, 1 << 20, 8 << 20, 250 << 20])
def test_a_demonstration_that_runs_out_of_room(ready_cache, tmp_path, n_bytes):
    """The demonstration says so, however far it got."""
    (tmp_path / "to").mkdir()
    with mounted(tmp_path / "to", f"size={n_bytes}") as place:
        env = {"EXPERTIER_CACHE_DIR": ready_cache, "TMPDIR": str(place)}
        code = "import shutil; shutil.disk_usage = lambda _: type('', (), {'free': 1 << 60})\n"
        code += "from expertier.cli.app import main; import sys; sys.argv[1:] = ['demo']; main()"
        process(sys.executable, "-c", code, env=env).must_refuse(place)
        assert not list(place.iterdir())


def test_a_run_of_the_demonstration_whose_logits_have_no_room(tiny, ready_cache, tmp_path):
    (tmp_path / "to").mkdir()
    with full_disk(tmp_path / "to") as place:
        options = {
            "model": str(tiny),
            "prompt": [1, 2],
            "n_tokens": 1,
            "n_threads": 1,
            "logits_path": f"{place}/l.npy",
        }
        ended = process(
            sys.executable, "-m", "expertier.engine_adapter.hosts.measured_run", json.dumps(options),
            env={"EXPERTIER_CACHE_DIR": ready_cache},
        )  # fmt: skip
        assert ended.status == 2, ended
        assert "Traceback" not in ended.err
        assert f"the logits cannot be written to {place}/l.npy: No space left" in ended.err


@pytest.mark.parametrize("what", [("run", "-p", "some words", "-n", 40, "-t", 1, "--ctx", 256), ("inspect",)])
def test_nobody_reads(tiny, ready_cache, what):
    readable, writable = os.pipe()
    os.close(readable)
    name, *options = what
    ended = process(*OURS, name, tiny, *options, env={"EXPERTIER_CACHE_DIR": ready_cache}, stdout=writable)
    os.close(writable)
    ended.must_refuse("standard output", "Broken pipe")


@pytest.mark.skipif(os.getuid() != 0, reason="mounts over /proc in a namespace of its own")
@pytest.mark.parametrize("what", ["run", "plan", "inspect"])
def test_no_proc(tiny, ready_cache, what):
    options = {"run": "-p words -n 2 -t 1 --ctx 64", "plan": "", "inspect": ""}[what].split()
    command = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    if process("unshare", "-m", "mount", "-t", "tmpfs", "none", "/proc", env={}).status != 0:
        pytest.skip("mounting is not allowed here")
    ended = process(*command, *OURS, what, tiny, *options, env={"EXPERTIER_CACHE_DIR": ready_cache})
    assert ended.status == 0, ended.err
    assert "Traceback" not in ended.err


def test_an_address_space_that_is_too_small(tiny, ready_cache):
    """An allocation that fails, in Python or in the engine, gives one message."""
    for n_kib in (1_200_000, 1_500_000, 2_000_000):
        command = ["sh", "-c", f'ulimit -v {n_kib}; exec "$@"', "sh", *OURS]
        ended = process(
            *command, "run", tiny, "-p", "x", "-n", 1, "-t", 1, "--ctx", 500000,
            env={"EXPERTIER_CACHE_DIR": ready_cache, "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        assert "Traceback" not in ended.err, ended.err
        assert ended.status in (0, 2), ended


def test_files_are_there_as_a_whole_or_not_at_all(recording, ready_cache, tmp_path):
    """A synth that is ended by a limit of the system, at any place, leaves nothing."""
    for n_blocks in (1, 100, 3000):
        command = ["sh", "-c", f'ulimit -f {n_blocks}; exec "$@"', "sh", *OURS]
        env = {"EXPERTIER_CACHE_DIR": ready_cache}
        process(*command, "synth", "--trace", recording, "-o", tmp_path / "m.gguf", env=env).must_refuse(
            tmp_path / "m.gguf", "ulimit -f"
        )
        assert [path.name for path in tmp_path.iterdir()] == ["ids.npz"]
    assert Path(ready_cache).is_dir()
