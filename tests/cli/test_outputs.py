"""Every command with each of its outputs where nothing can be written: one message, status 2, nothing half-written.

These commands run in this process, and a limit on the size of files stands for a full disk; `test_outputs_deep.py`
runs commands in processes of their own, on disks that are full.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from expertier.atomic_file import writing_atomically
from expertier.cli import plan_plot
from expertier.engine_adapter.hosts import demo
from expertier.engine_adapter.hosts.routing_recording import RoutingRecording
from expertier.engine_adapter.models.synth import TINY_SHAPE
from expertier.errors import ConfigError
from expertier.planner.traces.trace import Phase
from expertier.probe import probe as probing
from expertier.probe.device_rates import DeviceRates
from expertier.probe.file_rates import FileRates
from expertier.tiers.model.table import ExpertTable
from failures.failing_targets import full, missing, read_only
from servers.commands import command


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """A recording of routing, and its steps as synth wants them."""
    folder = tmp_path_factory.mktemp("recording")
    rng = np.random.default_rng(0)
    ids = np.stack([[rng.permutation(16)[:2] for _ in range(2)] for _ in range(8)]).astype(np.int32)
    np.savez(folder / "ids.npz", ids=ids)
    return folder / "ids.npz"


@pytest.fixture
def words(tiny, recording):
    """Return a command's words, its places filled in."""

    def of(command_line: str, to: Path) -> list[str]:
        named = {"TINY": tiny, "RECORDING": recording, "TO": to}
        return [
            re.sub("TINY|RECORDING|TO", lambda found: str(named[found[0]]), word)
            for word in command_line.split()
        ]

    return of


@pytest.fixture(autouse=True)
def _quick(tmp_path, monkeypatch):
    """Replace measurements and plots by quick ones, and unset the user's variables."""
    for name in [name for name in os.environ if name.startswith("MOE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EXPERTIER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(probing, "measure_file", lambda _: FileRates(1e9, 1e9, None))
    monkeypatch.setattr(
        probing, "measure_device", lambda _: DeviceRates(link=None, between_slots=1e9, read_back_s=None)
    )
    monkeypatch.setattr(plan_plot, "_PACKAGES", {".png": "json", ".html": "json"})
    monkeypatch.setattr(plan_plot, "_png", lambda path, document: path.write_text(str(document)))
    monkeypatch.setattr(plan_plot, "_html", lambda path, document: path.write_text(str(document)))


OUTPUTS = {
    "synth": "synth --trace RECORDING --n-ff 32 --gate-up-type F32 --down-type F32 -o TO/made.gguf",
    "profile": "profile make RECORDING -o TO/made.npz",
    "plot": "plan TINY --ram 2GiB --plot TO/made.png",
    "html": "plan TINY --ram 2GiB --plot TO/made.html",
}
"""Commands that write a file `made.*` into a folder."""


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_file_that_cannot_be_written(words, tmp_path, output):
    (tmp_path / "good").mkdir()
    assert command(*words(OUTPUTS[output], tmp_path / "good")).status == 0
    (good,) = (tmp_path / "good").iterdir()
    before = good.read_bytes()
    with full(tmp_path / "good") as place:
        command(*words(OUTPUTS[output], place)).must_refuse(good, "File too large", "ulimit")
    assert [path.name for path in place.iterdir()] == [good.name]
    assert good.read_bytes() == before, "what was there stays"
    with missing(tmp_path) as place:
        command(*words(OUTPUTS[output], place)).must_refuse(
            place / good.name, "No such file", "make the folder"
        )
        assert not place.exists()
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / good.name).symlink_to("/dev/full")
    command(*words(OUTPUTS[output], tmp_path / "device")).must_refuse(good.name, "a device or a pipe")
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_folder_that_cannot_be_written(words, tmp_path, output):
    (tmp_path / "saved").mkdir()
    with read_only(tmp_path / "saved") as place:
        ended = command(*words(OUTPUTS[output], place))
        ended.must_refuse(place / "made.", "rmission" if os.getuid() else "Read-only file system", "give a")


def test_an_interrupt_leaves_nothing(tmp_path):
    def interrupted() -> None:
        with writing_atomically(tmp_path / "made") as path:
            path.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["missing", "full", "read-only"])
def test_a_recording_of_a_run(tiny, tmp_path, monkeypatch, where):
    """A place that cannot be written is refused before the engine is looked for; later failures have a message too."""
    (tmp_path / "to").mkdir()
    record = ("run", tiny, "-p", "x", "-n", 1, "--record-routing")
    if where == "missing":
        with missing(tmp_path) as place:
            command(*record, place / "r.npz").must_refuse(place / "r.npz", "make the folder")
    elif where == "read-only":
        with read_only(tmp_path / "to") as place:
            command(*record, place / "r.npz").must_refuse(place / "r.npz", "give a")
    else:
        recording = RoutingRecording(tmp_path / "to" / "r.npz", ExpertTable.from_gguf(tiny), n_ubatch=1)
        monkeypatch.setattr(recording.log, "take", lambda: [(0, [1, 2, 3, 4])])
        with (
            full(tmp_path / "to") as place,
            pytest.raises(ConfigError, match="recorded routing cannot be written"),
            recording,
        ):
            recording.after_batch(Phase.DECODE, 1)
        assert not list(place.iterdir())


def test_a_probe_that_cannot_be_saved(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    with read_only(tmp_path / "cache") as place:
        command("probe", "--no-engine").must_refuse(place, "EXPERTIER_CACHE_DIR")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EXPERTIER_CACHE_DIR", str(tmp_path / "file"))
    command("probe", "--no-engine").must_refuse(tmp_path / "file", "EXPERTIER_CACHE_DIR")
    monkeypatch.setenv("EXPERTIER_CACHE_DIR", str(tmp_path / "other"))
    with full(tmp_path):
        command("probe", "--no-engine").must_refuse(tmp_path / "other" / "probe", "File too large")
    assert not list((tmp_path / "other" / "probe").iterdir())


def test_a_plan_needs_no_cache_folder(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for folder in ("file/below", "none"):
        monkeypatch.setenv("EXPERTIER_CACHE_DIR", str(tmp_path / folder))
        assert command("plan", tiny, "--ram", "2GiB", "--json").status == 0
    assert not (tmp_path / "none").exists(), "nor makes one"
    monkeypatch.delenv("EXPERTIER_CACHE_DIR")
    monkeypatch.setenv("HOME", "")
    assert command("plan", tiny, "--ram", "2GiB", "--json").status == 0


def test_no_temporary_folder_for_the_demonstration(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "prepare_engine", lambda *_: None)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    command("demo").must_refuse(tmp_path / "missing", "TMPDIR", "make it")
    (tmp_path / "to").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "to"))
    with full(tmp_path / "to") as place:
        command("demo").must_refuse(place, "File too large", "TMPDIR")
    assert not list(place.iterdir())
    monkeypatch.setattr(demo, "DEMO_SHAPE", TINY_SHAPE)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    command("demo").must_refuse(place, "1.0 MiB are free", "TMPDIR")
    with read_only(tmp_path / "to") as place:
        monkeypatch.undo()
        monkeypatch.setattr(demo, "prepare_engine", lambda *_: None)
        monkeypatch.setenv("TMPDIR", str(place))
        command("demo").must_refuse(place, "TMPDIR")


@pytest.mark.parametrize("how", ["read-only", "a file"])
def test_an_engine_that_cannot_be_saved(tmp_path, monkeypatch, how):
    (tmp_path / "cache").mkdir()
    if how == "read-only":
        with read_only(tmp_path / "cache") as place:
            command("engine", "build").must_refuse(place, "EXPERTIER_CACHE_DIR")
        return
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EXPERTIER_CACHE_DIR", str(tmp_path / "file"))
    command("engine", "build").must_refuse(tmp_path / "file", "EXPERTIER_CACHE_DIR")


PRINTING = [
    "--help",
    "--version",
    "inspect TINY",
    "inspect TINY --json",
    "plan TINY --ram 2GiB",
    "replay RECORDING --slots 2 --policy belady",
    "profile show RECORDING",
    "profile make RECORDING -o TO/p.npz",
    "probe --no-engine",
    "engine info",
]


@pytest.mark.parametrize("printing", PRINTING)
def test_standard_output_that_cannot_be_written(words, tmp_path, printing):
    arguments = words(printing, tmp_path)
    readable, writable = os.pipe()
    os.close(readable)
    with open(writable, "w") as pipe:
        command(*arguments, stdout=pipe).must_refuse("standard output", "Broken pipe", "write to a file")
    with open("/dev/full", "w") as device:
        command(*arguments, stdout=device).must_refuse("standard output", "No space left on device")


def test_standard_error_that_cannot_be_written_ends_nothing(recording, tmp_path):
    with open("/dev/full", "w") as device:
        done = command("profile", "make", recording, "-o", tmp_path / "p.npz", stderr=device)
        assert done.status == 0
        made = command("synth", "--trace", recording, "-o", tmp_path / "s.gguf", "--n-ff", 256, stderr=device)
        assert made.status == 0, "what it says while it works is lost, and no more"
        assert command("inspect", tmp_path / "none.gguf", stderr=device).status == 2


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, os.strerror(errno.EIO), "/a/file"),
        OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/a/file"),
        MemoryError(),
    ],
    ids=["disk", "files", "memory"],
)
def test_what_nobody_put_into_words(tiny, monkeypatch, error):
    def fails(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr("expertier.cli.app.ExpertTable.from_gguf", fails)
    ended = command("inspect", tiny)
    ended.must_refuse("memory" if isinstance(error, MemoryError) else "/a/file cannot be used")


def test_an_interrupt_has_its_status(tiny, monkeypatch):
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("expertier.cli.app.ExpertTable.from_gguf", interrupted)
    ended = command("inspect", tiny)
    assert (ended.status, ended.out) == (130, "")
    assert "Traceback" not in ended.err


def test_the_name_of_a_file_need_not_be_text(tiny, tmp_path):
    path = tmp_path / os.fsdecode(b"\xff.gguf")
    path.symlink_to(tiny)
    with open(tmp_path / "out", "w", encoding="utf-8") as out:
        assert command("inspect", path, stdout=out).status == 0
    assert "udcff" in (tmp_path / "out").read_text()
