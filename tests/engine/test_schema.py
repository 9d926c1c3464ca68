"""Schemas that the engine could not follow are refused before a token is generated."""

import json
from typing import Any

import pytest

from app.engine.schema import check_json_schema
from app.errors import InvalidField


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}, "required": ["color"]},
        {"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "integer"}}},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {},
        nested(20),
    ],
)
def test_useful_schemas_pass(schema: dict[str, Any]) -> None:
    check_json_schema(schema)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "strange"}, r"\$\.type: "),
        ({"properties": {"a": {"type": 1}}}, r"\$\.properties\.a\.type: "),
        ({"type": "number", "multipleOf": 3}, "cannot be enforced"),
        ({"type": "array", "uniqueItems": True}, "cannot be enforced"),
        ({"$ref": "#"}, "leads back to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "leads back"),
        ({"$ref": "http://127.0.0.1:9/x"}, "leads out"),
        ({"enum": []}, "json_schema"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "json_schema"),
        ({"type": "string", "pattern": "("}, "json_schema"),
        ({"type": "string", "pattern": "a{99999999999999999999}"}, "json_schema"),
        ({"type": "string", "pattern": "(" * 3000 + ")" * 3000}, "json_schema"),
        ({"properties": {"\ud800": {"type": "x"}}}, "json_schema"),
        (nested(150), "nested too deeply"),
    ],
)
def test_other_schemas_are_refused_with_a_reason(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidField, match=message) as raised:
        check_json_schema(schema)
    assert raised.value.field == "json_schema"
    assert ".cc:" not in raised.value.detail
    json.loads(raised.value.response({}).body)
