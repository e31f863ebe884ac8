"""Finds waits without a limit, pauses and threads that outlive a failed test, in the source text of tests.

A line that needs one says why in a comment: `# no limit: ...`, or `# a pause: ...`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NO_LIMIT, PAUSE = "# no limit: ", "# a pause: "

_SHORTEST_S = 1.0
_WAITS = {
    "join",
    "wait",
    "get",
    "result",
    "exception",
    "acquire",
    "communicate",
}  # with no argument: for ever
_NUMBERED = {"join", "wait", "result"}  # those whose first argument is the limit
_TIMED = {  # calls that take a limit as a keyword, and what comes first
    "run": ("subprocess",),
    "call": ("subprocess",),
    "check_call": ("subprocess",),
    "check_output": ("subprocess",),
    "urlopen": ("request", ""),
    "create_connection": ("socket",),
    "HTTPConnection": ("client", ""),
    "OpenAI": ("openai",),
    "as_completed": ("futures", ""),
}
_FOREVER = {("os", "wait"), ("os", "waitpid"), ("signal", "pause"), ("signal", "sigwait")}
_POSITIONAL = {"create_connection": 2, "urlopen": 3}


@dataclass(frozen=True)
class Found:
    """What is wrong in a line."""

    line: int
    what: str


def find(source: str) -> list[Found]:
    """Return what is wrong in a file, in the order of its lines."""
    lines = source.splitlines()
    found = [each for node in ast.walk(ast.parse(source)) for each in _look(node, lines)]
    return sorted(found, key=lambda each: each.line)


def _look(node: ast.AST, lines: Sequence[str]) -> Iterator[Found]:
    if isinstance(node, ast.withitem) and _name(node.context_expr) == ("subprocess", "Popen"):
        yield Found(
            node.context_expr.lineno, "a block that waits for a process without a limit: use child_process"
        )
    if not isinstance(node, ast.Call):
        return
    text = " ".join(lines[node.lineno - 1 : node.end_lineno])
    owner, name = _name(node)
    if NO_LIMIT not in text and _is_unlimited(node, owner, name):
        yield Found(node.lineno, f"{owner}.{name} waits without a limit")
    if PAUSE in text:
        return
    if name == "sleep" and owner in ("time", ""):
        yield Found(
            node.lineno, "a pause: wait_until waits for a state, Running.must_wait_in for a waiting thread"
        )
    if name in _NUMBERED and any(_is_short(value) for value in _limits(node)):
        yield Found(
            node.lineno, f"{owner}.{name} waits so short that it shows nothing: see Running.must_wait_in"
        )
    if (owner, name) in {("threading", "Thread"), ("", "Thread")} and not _has(node, "daemon"):
        yield Found(
            node.lineno, "a thread that keeps the process from ending, if the test fails: daemon=True"
        )


def _is_unlimited(node: ast.Call, owner: str, name: str) -> bool:
    if (owner, name) in _FOREVER:
        return True
    if owner in _TIMED.get(name, ()):
        return not _has(node, "timeout") and len(node.args) < _POSITIONAL.get(name, 99)
    if isinstance(node.func, ast.Attribute) and name in _WAITS:
        return not node.args and not _has(node, "timeout") and not _has(node, "blocking")
    return (
        name == "map"
        and len(node.args) > 1
        and isinstance(node.func, ast.Attribute)
        and not _has(node, "timeout")
    )


def _limits(node: ast.Call) -> list[ast.expr]:
    return [*node.args[:1], *(word.value for word in node.keywords if word.arg == "timeout")]


def _is_short(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, float) and value.value < _SHORTEST_S


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _has(node: ast.Call, keyword: str) -> bool:
    return any(word.arg in (keyword, None) and not _is_none(word.value) for word in node.keywords)


def _name(node: ast.expr) -> tuple[str, str]:
    """The last two words of what is called: `a.b.c(...)` gives b and c."""
    function = node.func if isinstance(node, ast.Call) else node
    if isinstance(function, ast.Name):
        return "", function.id
    if isinstance(function, ast.Attribute):
        owner = function.value
        return owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "?"), function.attr
    return "?", "?"
