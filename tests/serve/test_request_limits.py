"""What would end the engine's process, or keep it busy for long, is refused with the limit; real requests pass."""

from __future__ import annotations

import json

import pytest

from expertier.engine_adapter.hosts.server import request_limits as limits
from expertier.engine_adapter.hosts.server.request_limits import RefusedRequestError, checked_body


def nested(n: int, begin: str = "[", end: str = "]", middle: str = "") -> str:
    return begin * n + middle + end * n


def array_schema(n: int) -> str:
    return nested(n, '{"type":"array","items":', "}", '{"type":"null"}')


def reference_chain(n: int) -> str:
    definitions = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(n)} | {f"a{n}": {"type": "null"}}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": definitions})


def chat(field: str, value: str) -> str:
    return f'{{"messages": [{{"role": "user", "content": "a"}}], "{field}": {value}}}'


def response_format(schema: str) -> str:
    return chat("response_format", f'{{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}')


def tools(schema: str) -> str:
    return chat("tools", f'[{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}]')


def grammar(text: str) -> str:
    return json.dumps({"prompt": "a", "grammar": text})


def trigger(text: str) -> str:
    return json.dumps(
        {
            "prompt": "a",
            "grammar": 'root ::= "a"',
            "grammar_lazy": True,
            "grammar_triggers": [{"type": 2, "value": text}],
        }
    )


def with_arguments(text: str) -> str:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    return json.dumps({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]})


REFUSED = {
    "grammar_groups": (grammar("root ::= " + nested(50_000, "(", ")", '"a"')), limits.MAX_GROUPS),
    "grammar_in_a_quote": (grammar('root ::= <"> ' + nested(50_000, "(", ")", '"a"')), limits.MAX_GROUPS),
    "grammar_size": (grammar("root ::= " + " | ".join(['"a"'] * 100_000)), limits.MAX_GRAMMAR_BYTES),
    "lazy_trigger": (trigger(nested(500, "(", ")", "a")), limits.MAX_TRIGGER_GROUPS),
    "long_trigger": (trigger("a" * 5000), limits.MAX_TRIGGER_BYTES),
    "response_format_depth": (response_format(array_schema(200)), limits.MAX_DEPTH),
    "json_schema_depth": (f'{{"prompt": "a", "json_schema": {array_schema(200)}}}', limits.MAX_DEPTH),
    "tool_depth": (tools(array_schema(100_000)), limits.MAX_DEPTH),
    "references": (response_format(reference_chain(500)), limits.MAX_SCHEMA_LEVELS),
    "references_of_deep_definitions": (
        response_format(
            json.dumps(
                {
                    "$defs": {
                        f"a{i}": json.loads(array_schema(60).replace("null", f"x{i}"))
                        | {"$ref": f"#/$defs/a{i + 1}"}
                        for i in range(100)
                    }
                }
            )
        ),
        limits.MAX_SCHEMA_LEVELS,
    ),
    "properties": (
        response_format(json.dumps({"properties": {f"a{i}": {} for i in range(10_000)}})),
        limits.MAX_ENTRIES,
    ),
    "alternatives": (
        response_format(json.dumps({"anyOf": [{"const": i} for i in range(8000)]})),
        limits.MAX_ITEMS,
    ),
    "long_name": (response_format(json.dumps({"properties": {"a" * 100_000: {}}})), limits.MAX_NAME_BYTES),
    "pattern": (response_format(json.dumps({"pattern": nested(5000, "(", ")", "a")})), limits.MAX_GROUPS),
    "schema_size": (response_format(json.dumps({"const": "a" * 2_000_000})), limits.MAX_SCHEMA_BYTES),
    "unknown_field": (chat("some_new_schema", array_schema(200)), limits.MAX_DEPTH),
    "body_depth": (chat("x", nested(1_000_000)), limits.MAX_DEPTH),
    "message_depth": (f'{{"messages": {nested(5000)}}}', limits.MAX_DEPTH),
    "template_arguments": (chat("chat_template_kwargs", nested(100_000)), limits.MAX_DEPTH),
    "call_arguments": (with_arguments(nested(100_000)), limits.MAX_DEPTH),
    "call_arguments_less_deep": (with_arguments(nested(200)), limits.MAX_DEPTH),
    "not_an_object": (nested(200), limits.MAX_DEPTH),
}


@pytest.mark.parametrize(("body", "limit"), REFUSED.values(), ids=REFUSED)
def test_what_would_end_the_process(body, limit):
    with pytest.raises(RefusedRequestError) as caught:
        checked_body(body.encode())
    assert str(limit) in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b"no json",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": "\xff"}',
        '{"a": 1}'.encode("utf-16"),
        b'{"a": "\\ud800"}',
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a": 1} {"b": 2}',
    ],
)
def test_what_is_no_json(body):
    with pytest.raises(RefusedRequestError, match="no JSON"):
        checked_body(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"text"',
        json.dumps({"prompt": "(" * 100_000, "logit_bias": {str(i): -1.5 for i in range(10_000)}}).encode(),
        json.dumps({"prompt": list(range(100_000)), "n_predict": 4}).encode(),
        json.dumps({"input": ["ünï" * 1000] * 3000}, ensure_ascii=False).encode(),
        response_format(array_schema(100)).encode(),
        response_format(reference_chain(100)).encode(),
        tools(json.dumps({"properties": {f"a{i}": {"type": "string"} for i in range(300)}})).encode(),
        grammar("root ::= " + nested(500, "(", ")", '"a"')).encode(),
        with_arguments('{"a": [1, {"b": 2.5}]}').encode(),
        with_arguments("no json").encode(),
    ],
)
def test_real_requests_stay_what_they_are(body):
    handed_on = checked_body(body)
    assert (json.loads(handed_on) if handed_on else None) == (json.loads(body) if body else None)


def test_what_is_handed_on_is_what_was_looked_at():
    """Of two fields of one name the engine might take the other."""
    assert checked_body(b'{"grammar": "((((", "grammar": "ok", "x": 1.0}') == b'{"grammar":"ok","x":1.0}'
