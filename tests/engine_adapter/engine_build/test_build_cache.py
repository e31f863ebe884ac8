from __future__ import annotations

import errno
import os
from pathlib import Path

import platformdirs
import pytest

from expertier.engine_adapter.build.cache import (
    CACHE_VARIABLE,
    cache_folder,
    locked,
    make_subfolder,
    move_into_place,
    staging,
)
from expertier.errors import BuildError, ConfigError


def test_the_variable_names_the_folder() -> None:
    assert cache_folder({CACHE_VARIABLE: "/some/where"}) == Path("/some/where")
    assert cache_folder({CACHE_VARIABLE: "~/x"}) == Path.home() / "x"


@pytest.mark.parametrize("environ", [{}, {CACHE_VARIABLE: ""}])
def test_the_users_own_folder_otherwise(environ: dict[str, str]) -> None:
    assert cache_folder(environ) == platformdirs.user_cache_path("expertier")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Was a folder named `~`, or a RuntimeError."""
    with pytest.raises(ConfigError, match=r"~nobody-of-this-name/x'.*whole path"):
        cache_folder({CACHE_VARIABLE: "~nobody-of-this-name/x"})
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: Path("~/.cache", name))
    with pytest.raises(ConfigError, match=f"no home folder.*{CACHE_VARIABLE}"):
        cache_folder({})


def test_a_folder_that_cannot_be_made_is_an_error_that_names_the_variable(cache: Path) -> None:
    cache.write_text("a file is in the way")
    with pytest.raises(BuildError, match=CACHE_VARIABLE):
        make_subfolder("headers")


def test_a_staging_folder_goes_when_it_was_not_moved(tmp_path: Path) -> None:
    def half_a_build() -> None:
        with staging(tmp_path) as folder:
            (folder / "part").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half_a_build()
    assert list(tmp_path.glob(".new-*")) == []


def test_a_disk_that_fills_up_on_the_way(tmp_path: Path) -> None:
    """Was an OSError."""
    refused = pytest.raises(BuildError, match=f"No space left on device.*{CACHE_VARIABLE}")
    with refused, staging(tmp_path) as folder, (folder / "part").open("wb") as part:
        part.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "part"))
    assert list(tmp_path.glob(".new-*")) == []


def test_who_cannot_lock_goes_on(tmp_path: Path) -> None:
    """Was an OSError: only time depends on the lock."""
    with locked(tmp_path / "missing" / ".lock"):
        pass


def test_a_filled_folder_moves_at_once(tmp_path: Path) -> None:
    with staging(tmp_path) as folder:
        (folder / "part").write_text("whole")
        move_into_place(folder, tmp_path / "done")
    assert (tmp_path / "done" / "part").read_text() == "whole"
    assert list(tmp_path.glob(".new-*")) == []


def test_who_comes_second_keeps_the_first_ones_folder(tmp_path: Path) -> None:
    with staging(tmp_path) as second:
        (second / "part").write_text("second")
        (tmp_path / "done").mkdir()
        (tmp_path / "done" / "part").write_text("first")
        move_into_place(second, tmp_path / "done")
    assert (tmp_path / "done" / "part").read_text() == "first"
    assert list(tmp_path.glob(".new-*")) == []


def test_a_folder_that_does_not_count_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "part").write_text("damaged")
    with staging(tmp_path) as folder:
        (folder / "part").write_text("whole")
        move_into_place(folder, tmp_path / "done", keep=lambda: False)
    assert (tmp_path / "done" / "part").read_text() == "whole"
    assert list(tmp_path.glob(".new-*")) == []


def test_a_move_that_fails_for_another_reason_is_raised(tmp_path: Path) -> None:
    with staging(tmp_path) as folder, pytest.raises(OSError, match="No such file"):
        move_into_place(folder, tmp_path / "nowhere" / "done")


def test_a_lock_is_free_again_after_use(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path / "lock"):
            pass
