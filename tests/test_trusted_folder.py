"""Whose code is loaded: nothing from where others can write, whichever part of the way it is."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

import pytest

from expertier.errors import ConfigError
from expertier.trusted_folder import keep_from_others, make_private_folder, require_trusted

ANOTHER = 12_345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def library(root: Path) -> Path:
    make_private_folder(root / "plugins" / "one", root)
    library = root / "plugins" / "one" / "lib.so"
    library.write_bytes(b"code")
    library.chmod(0o755)
    require_trusted(library.parent, root)
    return library


def places(library: Path) -> dict[str, Path]:
    folder = library.parent
    return {"root": folder.parent.parent, "kind": folder.parent, "folder": folder, "file": library}


def refused(path: Path, root: Path, place: Path, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_trusted(path, root)
    assert f"from {place}: " in str(caught.value)
    assert said in str(caught.value)
    assert "EXPERTIER_CACHE_DIR" in str(caught.value)


@pytest.mark.parametrize("mode", [0o777, 0o702, 0o1777])
@pytest.mark.parametrize("what", ["root", "kind", "folder", "file"])
def test_what_everybody_can_write_to(root, library, what, mode):
    place = places(library)[what]
    place.chmod(mode)
    for path in {library, library.parent}:
        refused(path, root, place, "every user can write")


@needs_root
@pytest.mark.parametrize("what", ["root", "kind", "folder", "file"])
def test_what_belongs_to_others(root, library, what):
    place = places(library)[what]
    os.chown(place, ANOTHER, ANOTHER)
    refused(library.parent, root, place, f"belongs to the user {ANOTHER}")


@needs_root
def test_what_another_put_into_a_folder_of_ours(root, library):
    planted = library.with_name("planted.so")
    planted.write_bytes(b"code")
    os.chown(planted, ANOTHER, ANOTHER)
    refused(library.parent, root, planted, "belongs to")


@needs_root
@pytest.mark.parametrize(
    ("gid", "ok"), [(0, True), (ANOTHER, False)], ids=["root_or_ones_own", "with_others_in_it"]
)
def test_a_group_may_write_where_nobody_else_is_in_it(root, library, gid, ok):
    os.chown(library.parent, -1, gid)
    library.parent.chmod(0o775)
    if ok:
        require_trusted(library.parent, root)
    else:
        refused(library.parent, root, library.parent, "in its group")


@pytest.mark.parametrize(
    ("name", "members", "ok"),
    [("me", [], True), ("me", ["me"], True), ("me", ["me", "you"], False), ("users", [], False)],
)
def test_the_users_own_group(root, library, monkeypatch, name, members, ok):
    gid = library.parent.stat().st_gid or 4711
    if os.geteuid() == 0:
        os.chown(library.parent, -1, gid)
    library.parent.chmod(0o770)
    user = pwd.struct_passwd(("me", "x", os.geteuid(), gid, "", "/", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
    monkeypatch.setattr(grp, "getgrgid", lambda found: grp.struct_group((name, "x", found, members)))
    if ok:
        require_trusted(library.parent, root)
        monkeypatch.setattr(os, "listxattr", lambda *_, **__: ["system.posix_acl_access"])
    refused(library.parent, root, library.parent, "access list")


def test_above_the_root_a_sticky_folder_will_do(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    root = shared / "cache"
    make_private_folder(root / "plugins", root)
    shared.chmod(0o1777)
    require_trusted(root / "plugins", root)
    shared.chmod(0o777)
    refused(root / "plugins", root, shared, "every user can write")
    with pytest.raises(ConfigError, match="every user can write"):
        make_private_folder(root / "kernels", root)


def test_links_lead_to_what_they_lead_to(tmp_path, root, library):
    elsewhere = tmp_path / "disk" / "plugins"
    elsewhere.mkdir(parents=True)
    kind = library.parent.parent
    kind.rename(tmp_path / "old")
    kind.symlink_to(elsewhere)
    require_trusted(kind / "one", root)
    elsewhere.parent.chmod(0o777)
    refused(kind / "one", root, elsewhere.parent, "every user can write")
    elsewhere.parent.chmod(0o755)
    elsewhere.chmod(0o777)
    refused(kind, root, elsewhere, "every user can write")
    elsewhere.chmod(0o755)
    (elsewhere / "one").mkdir()
    (elsewhere / "one" / "lib.so").symlink_to(library_of(tmp_path, 0o777))
    refused(kind / "one", root, tmp_path / "far.so", "every user can write")
    (tmp_path / "far.so").chmod(0o755)
    (elsewhere / "one" / "round").symlink_to(elsewhere / "one")
    require_trusted(kind / "one", root)


def library_of(folder: Path, mode: int) -> Path:
    path = folder / "far.so"
    path.write_bytes(b"code")
    path.chmod(mode)
    return path


@needs_root
def test_a_link_of_anothers(tmp_path, root, library):
    kind = library.parent.parent
    kind.rename(tmp_path / "old")
    kind.symlink_to(tmp_path / "old")
    require_trusted(kind / "one", root)
    os.lchown(kind, ANOTHER, ANOTHER)
    refused(kind / "one", root, kind, "belongs to")


@pytest.mark.usefixtures("library")
def test_a_root_behind_a_link(tmp_path, root):
    link = tmp_path / "link"
    link.symlink_to(root)
    require_trusted(link / "plugins", link)
    root.chmod(0o1777)
    refused(link / "plugins", link, root, "every user can write")


def test_a_circle_of_links(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match="circle"):
        require_trusted(tmp_path / "a" / "plugins", tmp_path / "a")


@pytest.mark.parametrize("call", ["lstat", "scandir"])
def test_what_cannot_be_looked_at(root, library, monkeypatch, call):
    where = Path if call == "lstat" else os
    real = getattr(where, call)

    def refuse(path: Path) -> object:
        if Path(path) == library.parent:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(where, call, refuse)
    with pytest.raises(ConfigError, match=f"from {library.parent}: it cannot be checked"):
        require_trusted(library.parent, root)


def test_what_is_not_there_is_nobodys(root):
    require_trusted(root / "plugins" / "none", root)


def test_what_we_make_is_private_whatever_the_umask(root):
    old = os.umask(0)
    try:
        make_private_folder(root / "plugins" / "one", root)
        for place in (root, root / "plugins", root / "plugins" / "one"):
            assert stat.S_IMODE(place.stat().st_mode) == 0o700
        made = root / "plugins" / "one" / "lib.so"
        made.write_bytes(b"code")
        assert made.stat().st_mode & 0o022
    finally:
        os.umask(old)
    keep_from_others(made.parent)
    require_trusted(made.parent, root)
