"""Bugs that let in who may not ask, what may not be parsed, and whose code may not be loaded."""

from __future__ import annotations

from mutants.mutant import Mutant

_GUARD = ("tests/serve/test_guard.py",)
_LIMITS = ("tests/serve/test_request_limits.py",)
_FOLDERS = ("tests/test_trusted_folder.py",)
_CHANGES = ("tests/tiers/file/test_file_changes.py",)

TRUST = (
    Mutant(
        "a server answers by any name",
        "engine_adapter/hosts/server/guarded_connection.py",
        "if not self._hosts.allows_host(host, self._came_in_at):",
        "if False:",
        _GUARD,
    ),
    Mutant(
        "a server answers pages of others",
        "engine_adapter/allowed_hosts.py",
        "return name is not None and self._allows(_plain(name), came_in_at)",
        "return True",
        _GUARD,
    ),
    Mutant(
        "a body may be of any type",
        "engine_adapter/hosts/server/guarded_connection.py",
        'if kind != "application/json" or',
        "if",
        _GUARD,
    ),
    Mutant(
        "a request goes on for a client that left",
        "engine_adapter/hosts/server/guarded_connection.py",
        "return_when=asyncio.FIRST_COMPLETED)",
        "return_when=asyncio.ALL_COMPLETED)",
        _GUARD,
    ),
    Mutant(
        "groups of a grammar are not counted",
        "engine_adapter/hosts/server/request_limits.py",
        'grammar.count("("), MAX_GROUPS)',
        "0, MAX_GROUPS)",
        _LIMITS,
    ),
    Mutant(
        "only one definition of a schema counts",
        "engine_adapter/hosts/server/request_limits.py",
        "len(references) * _depth(value)",
        "_depth(value)",
        _LIMITS,
    ),
    Mutant(
        "the body is handed on as it came",
        "engine_adapter/hosts/server/request_limits.py",
        'return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()',
        "return body",
        _LIMITS,
    ),
    Mutant(
        "folders that everybody can write to are trusted",
        "trusted_folder.py",
        "if status.st_mode & stat.S_IWOTH:",
        "if False:",
        _FOLDERS,
    ),
    Mutant(
        "the sticky bit makes a cache trusted",
        "trusted_folder.py",
        "stat.S_ISDIR(status.st_mode) and not inside:",
        "stat.S_ISDIR(status.st_mode):",
        _FOLDERS,
    ),
    Mutant(
        "a plugin is loaded from anywhere",
        "engine_adapter/build/plugin.py",
        "        require_trusted_cache(folder)\n",
        "        pass\n",
        ("tests/engine_adapter/engine_build/test_ensure_plugin.py",),
    ),
    Mutant(
        "a time that was put back is believed",
        "tiers/model/file_identity.py",
        "            and stat.st_ctime_ns == self.ctime_ns\n",
        "",
        _CHANGES,
    ),
    Mutant(
        "a change without a reason is taken for another name",
        "tiers/file/open_file.py",
        "if reasons == self._known_reasons:",
        "if False:",
        _CHANGES,
    ),
    Mutant(
        "a header may lie in a hole",
        "tiers/model/gguf_header.py",
        "if not self._data.has(offset + n_bytes):",
        "if False:",
        ("tests/fuzz/test_finds.py",),
    ),
)
