"""`expertier probe`, as a user runs it; the engine's part is in tests/engine_adapter."""

from __future__ import annotations

import json
import os

import pytest

from expertier.errors import ConfigError
from expertier.hip import open_device
from expertier.planner.predict.rates import MachineRates, PathRate
from expertier.probe.device_rates import DeviceRates, measure_device
from expertier.probe.engine_rates import EngineRates
from expertier.probe.file_rates import FileRates, measure_file
from expertier.probe.probe import machine_key, probe_file, rates_of, run_probe, saved_probe
from expertier.testing.fake_device import FakeDevice
from expertier.units import MIB


@pytest.fixture(scope="module")
def ready_cache(tmp_path_factory):
    """A cache folder without a plugin: none of this needs the engine."""
    return str(tmp_path_factory.mktemp("cache"))


def test_measured_once_and_saved(expertier, tiny, tmp_path):
    env = {"EXPERTIER_CACHE_DIR": str(tmp_path)}
    first = expertier("probe", tiny, "--no-engine", "--json", env=env, fresh=False)
    assert first.status == 0, first.err
    document = first.document
    assert document["measured_now"] is True
    assert document["files"]["page_cache"] > 0
    assert document["device"]["link"] is None
    rates = MachineRates.from_dict(document["rates"])
    assert (
        min(
            rates.decode.bytes_per_s,
            rates.pool.bytes_per_s,
            rates.page_cache.bytes_per_s,
            rates.disk.bytes_per_s,
        )
        > 0
    )
    second = expertier("probe", tiny, "--no-engine", "--json", env=env, fresh=False).document
    assert second["measured_now"] is False
    assert second["rates"] == document["rates"]
    assert (
        expertier("probe", "--no-engine", "--again", "--json", env=env, fresh=False).document["measured_now"]
        is True
    )
    text = expertier("probe", env=env, fresh=False)
    assert "measured before" in text.out
    assert "from the page cache" in text.out
    planned = expertier("plan", tiny, "--ram", "2GiB", "--json", env=env, fresh=False).document
    assert "measured on this machine" in planned["rates_source"]


def test_a_probe_of_another_machine_or_a_damaged_one_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setenv("EXPERTIER_CACHE_DIR", str(tmp_path))
    key = machine_key("host", 0)
    assert saved_probe(key) is None
    with open_device("host") as device:
        made = run_probe(key, device, None, lambda _: None)
    assert saved_probe(key) == made
    assert saved_probe({**key, "processors": 999}) is None
    for damage in ("", "{", "[]", json.dumps({"format": 1}), json.dumps({**made.as_dict(), "rates": {}})):
        probe_file(key).write_text(damage)
        assert saved_probe(key) is None
    assert not list((tmp_path / "probe").glob(".sample-*")), "the sample file is gone"


def test_a_cache_folder_that_cannot_be(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EXPERTIER_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert saved_probe(machine_key("host", 0)) is None, "who only looks needs no folder"
    with open_device("host") as device, pytest.raises(ConfigError, match="EXPERTIER_CACHE_DIR"):
        run_probe(machine_key("host", 0), device, None, lambda _: None)


def test_files(tmp_path):
    path = tmp_path / "sample"
    path.write_bytes(os.urandom(24 * MIB))
    before = path.read_bytes()
    found = measure_file(path)
    assert found.page_cache is not None
    assert found.disk_cold is not None
    assert found.page_cache > 0
    assert path.read_bytes() == before
    (tmp_path / "small").write_bytes(b"x" * 100)
    assert measure_file(tmp_path / "small").page_cache is None


def test_a_device_with_streams_has_a_link_and_gives_all_memory_back():
    device = FakeDevice()
    found = measure_device(device)
    assert found.link is not None
    assert found.read_back_s is not None
    assert found.between_slots > 0
    assert (device.device_bytes, device.pinned_bytes) == (0, 0)


def test_the_engine_on_the_device_itself_goes_before_what_its_copies_say():
    files, moved = FileRates(8e9, 1e9, 2e9), DeviceRates(5e10, 1e12, 1e-5)
    guessed = rates_of(files, moved, None)
    ran = EngineRates(*(PathRate(n * 1e9, 1e-6, 0.1, measured=True) for n in (900, 5000, 40, 10)))
    found = rates_of(files, moved, ran)
    assert (found.decode, found.prefill, found.pool, found.page_cache) == (
        ran.decode,
        ran.prefill,
        ran.pool,
        ran.page_cache,
    )
    assert found.disk.bytes_per_s < 2e9, "the disk and the way on from the page cache, one after the other"
    assert guessed.decode.bytes_per_s == pytest.approx(1.2e12)


def test_an_engine_without_the_device_is_said(expertier, tmp_path):
    found = expertier(
        "probe", "--llama-cpp", tmp_path, env={"EXPERTIER_CACHE_DIR": str(tmp_path)}, fresh=False
    )
    assert found.status == 0, found.err
    assert "without the engine" in found.err


def test_a_device_that_does_not_open(expertier):
    expertier("probe", "--device", "hip:7").must_refuse()
    expertier("probe", "--device", "gpu").must_refuse("'gpu'")


def test_a_probe_that_others_could_have_planted(tmp_path, monkeypatch):
    monkeypatch.setenv("EXPERTIER_CACHE_DIR", str(tmp_path))
    file = probe_file(machine_key("host", 0))
    file.parent.mkdir(mode=0o700)
    file.write_text("{}")
    file.chmod(0o666)
    with pytest.raises(ConfigError, match=f"from {file}: every user can write to it"):
        saved_probe(machine_key("host", 0))
