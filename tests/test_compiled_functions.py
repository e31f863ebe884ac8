"""Compiled functions are cached in our cache folder, and compiled in each process where they cannot be cached."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numba import config, int64
from numba.core import caching

import expertier
from expertier import compiled_functions
from expertier.compiled_functions import FOLDER, cached_cfunc, cached_njit


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh cache folder, and a user who has told Numba nothing."""
    monkeypatch.setattr(config, "CACHE_DIR", "")
    monkeypatch.setattr(compiled_functions._State, "is_broken", False)
    monkeypatch.setattr(compiled_functions, "_trusted", set())
    monkeypatch.setattr(compiled_functions, "_warned", set())
    monkeypatch.setenv("EXPERTIER_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path / "cache" / FOLDER
    assert config.CACHE_DIR == "", "Numba's own setting is as it was"


def twice(number: int) -> int:
    return 2 * number


def cached_in(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.glob("*/*"))


def test_nothing_is_compiled_with_numbas_own_cache() -> None:
    package = Path(expertier.__file__).parent
    found = [path.name for path in package.rglob("*.py") if "cache=True" in path.read_text(encoding="utf-8")]
    assert found == [Path(compiled_functions.__file__).name], "use cached_njit and cached_cfunc"


def test_functions_are_cached_below_ours(cache: Path) -> None:
    assert cached_njit(int64(int64))(twice)(4) == 8
    assert cached_in(cache) == [".nbc", ".nbi"]
    late = cached_njit()(twice)
    assert late(4) == 8, "its types are known only now"
    again = cached_njit(int64(int64))(twice)
    assert sum(again.stats.cache_misses.values()) == 0
    assert cached_cfunc(int64(int64))(twice).ctypes(4) == 8


def test_what_others_could_have_written_is_not_loaded(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.mkdir(mode=0o700, parents=True)
    planted = cache / "planted"
    planted.mkdir()
    planted.chmod(0o777)
    assert cached_njit(int64(int64))(twice)(4) == 8
    assert cached_njit(int64(int64))(twice)(5) == 10
    assert [*cache.iterdir()] == [planted]
    assert len(caplog.records) == 1
    assert "every user can write to it" in caplog.text
    assert str(planted) in caplog.text


def test_what_a_user_tells_numba_goes_first(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(config, "CACHE_DIR", str(tmp_path / "numba"))
        assert cached_njit(int64(int64))(twice)(4) == 8
        assert str(tmp_path / "numba") == config.CACHE_DIR
    assert cached_in(tmp_path / "numba") == [".nbc", ".nbi"]
    assert not cache.exists()


@pytest.mark.parametrize("compiled", [cached_njit(int64(int64)), cached_njit(), cached_cfunc(int64(int64))])
@pytest.mark.parametrize("how", ["nowhere", "full", "damaged"])
def test_nothing_can_be_cached(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: str,
    compiled: object,
) -> None:
    def fails(*_arguments: object, **_named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(cache))

    if how == "nowhere":
        monkeypatch.setattr(caching.tempfile, "TemporaryFile", fails)  # how Numba tries a place
    elif how == "full":
        monkeypatch.setattr(caching.IndexDataCacheFile, "save", fails)
    else:
        monkeypatch.setattr(caching.IndexDataCacheFile, "_load_index", lambda _: 1 // 0)
    for _ in range(2):
        made = compiled(twice)
        assert getattr(made, "ctypes", made)(4) == 8
    (warning,) = [record.message for record in caplog.records]
    assert "cannot be cached" in warning
    assert "EXPERTIER_CACHE_DIR" in warning


def test_an_error_of_the_function_is_no_matter_of_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    def wrong(number: int) -> int:
        return number + "one"  # type: ignore[operator]

    with pytest.raises(Exception, match="No implementation"):
        cached_njit(int64(int64))(wrong)
    assert not caplog.records


def test_what_another_process_left_half_written_goes(cache: Path) -> None:
    place = cache / "some"
    place.mkdir(parents=True)
    for name, age in (("old.nbi.tmp.0123", 10_000), ("new.nbi.tmp.0123", 0)):
        (place / name).write_text("half")
        os.utime(place / name, (place.stat().st_mtime - age,) * 2)
    cached_njit(int64(int64))(twice)
    assert [path.name for path in place.iterdir()] == ["new.nbi.tmp.0123"]


@pytest.mark.deep
@pytest.mark.parametrize("writable", [True, False])
def test_a_container_that_runs_as_another_user(tmp_path: Path, writable: bool) -> None:
    """No home, a package that cannot be written to, and a cache folder that can, or cannot."""
    package = Path(expertier.__file__).parent
    alone = [
        "unshare",
        "-m",
        "sh",
        "-c",
        'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"',
    ]
    alone.append(str(package))
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting is not allowed here: {error}")
    rng = np.random.default_rng(0)
    np.save(tmp_path / "ids.npy", np.stack([[rng.permutation(8)[:2]] * 2 for _ in range(8)]).astype(np.int32))
    cache = tmp_path / "cache" if writable else Path("/proc/nowhere")
    command = (
        "import sys; from expertier.cli.app import main; main()",
        "profile",
        "make",
        "ids.npy",
        "-o",
        "p.npz",
    )
    done = subprocess.run(
        [*alone, sys.executable, "-c", *command],
        env={"PATH": os.environ["PATH"], "EXPERTIER_CACHE_DIR": str(cache), "HOME": "/proc/nowhere"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert ("cannot be cached" in done.stderr) != writable
    assert any((cache / FOLDER).glob("*/*.nbc")) == writable
