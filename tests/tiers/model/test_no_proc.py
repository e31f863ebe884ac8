"""Without /proc, as in some sandboxes, memory is asked for elsewhere and nothing fails."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from expertier.cli import plan_command
from expertier.engine_adapter.hosts import measured_run
from expertier.engine_adapter.hosts.server import sockets as server_sockets
from expertier.hip import open_device
from expertier.probe.probe import machine_key
from expertier.tiers.shared.host_memory import available_bytes, total_bytes


@pytest.fixture(autouse=True)
def _no_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr(measured_run, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(server_sockets, "_OPEN_FILES", tmp_path / "fd")


def test_memory_is_known(tmp_path: Path) -> None:
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert total_bytes() == ram
    assert 0 < available_bytes(own_cgroup=tmp_path / "cgroup") <= ram
    with open_device("host") as device:
        assert 0 < device.free_bytes() <= ram
    assert machine_key("host", 0)["ram_bytes"] == ram
    assert 0 < measured_run.rss_peak_bytes() <= ram
    assert plan_command._cores() >= 1


def test_open_files_are_found() -> None:
    readable, writable = os.pipe()
    assert {readable, writable} <= set(server_sockets._descriptors())
    os.close(readable)
    os.close(writable)
