"""Checks that no other user could have changed the content of our folder, before code is loaded from it.

A cache folder holds libraries, kernels and pickles that run with our rights. A file is trusted if it, its folder and
each folder up to the cache's root belong to the user or to root, and no other user can write to any of them. A user who
may write to a folder above the root could put another root in its place; folders with the sticky bit, such as /tmp, are
safe there, since only its owner can move a folder inside them. A group may have the right to write if it has no other
member: root's group, or the user's own group of the same name, which many systems make the default. For a symbolic
link, the link's owner is checked, and then the file that it leads to.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from expertier.errors import ConfigError

_ROOT = 0
_OVERFLOW_UID = 65534  # how owners from outside of a user namespace appear inside: of /, in many containers
_MAX_LINKS = 40
_ACCESS_LIST = "system.posix_acl_access"


def require_trusted(path: Path, root: Path) -> None:
    """Require that no other user can write to `path`, to anything in it, or to the folders up to `root` and above.

    A path that does not exist is trusted. Raises ConfigError, which names the path, the reason, and what to do.
    """
    _require_all(path, root, set())


def make_private_folder(folder: Path, root: Path) -> None:
    """Make a folder that only this user may enter, and missing folders above it; the folder may exist already.

    Raises OSError where that fails, and ConfigError where `require_trusted` would for the empty folder.
    """
    for place in (*reversed(folder.parents), folder):
        if not place.is_dir():
            place.mkdir(mode=0o700, exist_ok=True)
    _require_way(folder, root)


def keep_from_others(folder: Path) -> None:
    """Take other users' right to write to a new folder and its content, which this process's umask may have given."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)


def _require_all(path: Path, root: Path, seen: set[Path]) -> None:
    _require_way(path, root)
    seen.add(_real(path))
    for folder, folders, files in os.walk(path, onerror=_refuse_unseen):
        for name in (*folders, *files):
            place = Path(folder, name)
            try:
                status = place.lstat()
            except FileNotFoundError:  # another process removed it just now
                continue
            if not stat.S_ISLNK(status.st_mode):
                _require(place, status, inside=True)
            elif _real(place) not in seen:
                _require_all(place, root, seen)


def _require_way(path: Path, root: Path) -> None:
    real_path, real_root = _real(path), _real(root)
    for place, status in _on_the_way(path, root):
        inside = place.is_relative_to(root) or place.is_relative_to(real_root) or place == real_path
        _require(place, status, inside=inside)


def _on_the_way(path: Path, root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield each folder and link that the kernel passes on its way to `path`, with its status, as far as they exist."""
    at, links = Path("/"), 0
    todo = [*reversed(path.absolute().parts[1:])]
    yield at, at.lstat()
    while todo:
        name = todo.pop()
        if name == "..":
            at = at.parent
            continue
        at /= name
        try:
            status = at.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise _unseen(at, error) from error
        yield at, status
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MAX_LINKS:
                raise ConfigError(
                    f"{path} is a circle of links; set EXPERTIER_CACHE_DIR to another folder than {root}"
                )
            target = at.readlink()
            at = Path("/") if target.is_absolute() else at.parent
            todo += reversed([part for part in target.parts if part != "/"])


def _refuse_unseen(error: OSError) -> None:
    """Raise for a folder whose content cannot be seen, instead of skipping it."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise _unseen(error.filename, error) from error


def _unseen(place: object, error: OSError) -> ConfigError:
    return ConfigError(
        f"nothing is loaded from {place}: it cannot be checked ({error.strerror}), and other users may be able to "
        "write to it; make it yours (chown, chmod), or set EXPERTIER_CACHE_DIR to a folder of yours"
    )


def _require(place: Path, status: os.stat_result, *, inside: bool) -> None:
    why = _fault(place, status, inside=inside)
    if why is not None:
        raise ConfigError(
            f"nothing is loaded from {place}: {why}, who could have put code there that would run as you; look at "
            f"what is in it and take the right away (chmod go-w, chown), remove it, or set EXPERTIER_CACHE_DIR to a "
            "folder of yours"
        )


def _fault(place: Path, status: os.stat_result, *, inside: bool) -> str | None:
    """Return why another user controls a file or folder; None where no other user does."""
    if status.st_uid not in (_ROOT, os.geteuid()) and (inside or status.st_uid != _OVERFLOW_UID):
        return f"it belongs to {_user(status.st_uid)}"
    if stat.S_ISLNK(status.st_mode):  # a link's own mode means nothing
        return None
    if status.st_mode & stat.S_ISVTX and stat.S_ISDIR(status.st_mode) and not inside:
        return None
    mode = f"(mode {stat.S_IMODE(status.st_mode):o})"
    if status.st_mode & stat.S_IWOTH:
        return f"every user can write to it {mode}"
    if status.st_mode & stat.S_IWGRP and (_ACCESS_LIST in _attributes(place) or not _is_own_group(status)):
        return f"other users in its group, or in its access list, can write to it {mode}"
    return None


def _is_own_group(status: os.stat_result) -> bool:
    """Whether the group of a file has no other user than its owner: the user's own group, or root's."""
    if status.st_gid == 0:
        return True
    try:
        group, user = grp.getgrgid(status.st_gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve() raises for a circle


def _attributes(place: Path) -> list[str]:
    try:
        return os.listxattr(place, follow_symlinks=False)
    except OSError:  # a file system without attributes
        return []


def _user(number: int) -> str:
    try:
        return f"the user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"the user {number}"
