"""Bounds on what a request may have the engine parse.

The engine reads grammars, JSON schemas and patterns by recursive functions without a bound. 50,000 nested parentheses
in a grammar, 10,000 references that lead from one to the next, a schema 20,000 deep and a name of a million letters
each end the process, and 100,000 alternatives keep it busy for half a minute. The bounds are far above what real
requests have, and far below what the engine cannot do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from expertier.units import KIB, MIB

MAX_BODY_BYTES = 16 * MIB
MAX_DEPTH = 128
MAX_GRAMMAR_BYTES = 128 * KIB
MAX_GROUPS = 2048
MAX_TRIGGER_BYTES = 1 * KIB
MAX_TRIGGER_GROUPS = 64
MAX_SCHEMA_BYTES = 1 * MIB
MAX_ENTRIES = 512
MAX_NAME_BYTES = 1 * KIB
MAX_ITEMS = 2048
MAX_SCHEMA_LEVELS = 2048

_DATA = frozenset(
    {
        "content", "documents", "input", "input_extra", "input_prefix", "input_suffix", "instructions",
        "logit_bias", "messages", "prompt", "query", "system", "texts", "tokens",
    }
)  # fmt: skip
"""Fields with text for the model, or with numbers, of any length. Any other field may have a grammar or a schema."""

_SOME_DATA = "its messages or prompt"


class RefusedRequestError(Exception):
    """A body that is not passed on; the message is for the client."""


def checked_body(body: bytes) -> bytes:
    """Return the JSON to pass on, written anew, so that the engine reads what was checked. A body may be empty.

    Raises `RefusedRequestError`.
    """
    if not body:
        return body
    try:
        value = json.loads(body.decode(), parse_constant=_no_number)
        _check_depth(value, "the body")
        _check(value)
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except RecursionError:
        raise _too_deep("the body") from None
    except ValueError as error:  # the text, its encoding or a number is wrong
        raise RefusedRequestError(f"the body is no JSON: {error}") from error


def _check(value: Any) -> None:
    if not isinstance(value, dict):
        _check_schemas(value)
        return
    _check_schemas({key: part for key, part in value.items() if key not in _DATA and key != "grammar"})
    for key in value:
        _require("the name of a field", "bytes", _size(key), MAX_NAME_BYTES)
    grammar = value.get("grammar")
    if isinstance(grammar, str):
        _require("`grammar`", "bytes", _size(grammar), MAX_GRAMMAR_BYTES)
        _require("`grammar`", "groups, '('", grammar.count("("), MAX_GROUPS)
    elif grammar is not None:
        _check_schemas(grammar)
    for trigger in _strings(value.get("grammar_triggers")):
        _require("one of `grammar_triggers`", "bytes", _size(trigger), MAX_TRIGGER_BYTES)
        _require("one of `grammar_triggers`", "groups, '('", trigger.count("("), MAX_TRIGGER_GROUPS)
    _check_arguments(value.get("messages"))


def _check_schemas(value: Any) -> None:
    """Bound everything that is not plain data, whatever its field is called, as releases rename fields."""
    size = len(json.dumps(value, ensure_ascii=False))
    _require(f"the part of the body beside {_SOME_DATA}", "characters", size, MAX_SCHEMA_BYTES)
    references = set()
    for part in _values(value):
        if isinstance(part, dict):
            _require("an object of a schema or option", "entries", len(part), MAX_ENTRIES)
            references.add(str(part.get("$ref")))
            for name in part:
                _require("a name in a schema or option", "bytes", _size(name), MAX_NAME_BYTES)
        elif isinstance(part, list):
            _require("a list of a schema or option", "items", len(part), MAX_ITEMS)
        elif isinstance(part, str):
            _require("a text of a schema or option", "groups, '('", part.count("("), MAX_GROUPS)
    # One reference may lead to the next, and the engine follows them recursively.
    _require(
        "following its schemas' references", "levels", len(references) * _depth(value), MAX_SCHEMA_LEVELS
    )


def _check_arguments(messages: Any) -> None:
    """Bound the depth of calls' arguments, which are JSON in a string that the engine parses for templates."""
    for part in _values(messages):
        arguments = part.get("arguments") if isinstance(part, dict) else None
        if isinstance(arguments, str):
            try:
                _check_depth(json.loads(arguments), "`arguments` of a message")
            except RecursionError:
                raise _too_deep("`arguments` of a message") from None
            except ValueError:
                continue  # not JSON, which the engine will report


def _check_depth(value: Any, what: str) -> None:
    if _depth(value) > MAX_DEPTH:
        raise _too_deep(what)


def _depth(value: Any) -> int:
    """Return how many levels of objects and lists are nested, counting to one beyond the limit at most."""
    level = [value]
    for depth in range(MAX_DEPTH + 1):
        level = [part for part in level if isinstance(part, dict | list)]
        if not level:
            return depth
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
    return MAX_DEPTH + 1


def _values(value: Any) -> Iterator[Any]:
    """Yield the value and everything in it; its depth is bounded."""
    yield value
    if isinstance(value, dict):
        for part in value.values():
            yield from _values(part)
    elif isinstance(value, list):
        for part in value:
            yield from _values(part)


def _strings(value: Any) -> Iterator[str]:
    return (part for part in _values(value) if isinstance(part, str))


def _size(text: str) -> int:
    return len(text.encode(errors="replace"))


def _require(what: str, unit: str, found: int, limit: int) -> None:
    if found > limit:
        raise RefusedRequestError(f"{what} has {found} {unit}; at most {limit} are allowed: make it smaller")


def _too_deep(what: str) -> RefusedRequestError:
    return RefusedRequestError(
        f"{what} nests deeper than {MAX_DEPTH} levels of objects and lists, which is the limit: make it flatter"
    )


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")
