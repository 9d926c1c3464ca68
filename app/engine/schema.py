"""Is a JSON schema one that the engine can follow? Asked before any token is generated.

The engine compiles a schema in its own process, after the thinking; what it cannot compile would end the answer there.
"""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema

from app.errors import InvalidField

FIELD = "json_schema"


def check_json_schema(schema: dict[str, Any]) -> None:
    """Blocking: tens of milliseconds for a large schema.

    Raises:
        InvalidField: Not a JSON schema (with the place), or one with features that xgrammar does not have.
    """
    import xgrammar
    from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

    try:
        jsonschema.Draft202012Validator.check_schema(schema)
        _check_references(schema)
        if has_xgrammar_unsupported_json_features(schema):
            raise InvalidField(
                "json_schema: it uses a keyword that cannot be enforced (multipleOf, uniqueItems, contains, an unknown "
                "format, or pattern with a length); leave that out",
                field=FIELD,
            )
        xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)
    except InvalidField:
        raise
    except jsonschema.SchemaError as error:
        raise InvalidField(
            f"json_schema: not a JSON schema: {error.json_path}: {error.message}", field=FIELD
        ) from error
    except RecursionError:
        raise InvalidField("json_schema: it is nested too deeply", field=FIELD) from None
    except Exception as error:  # re, xgrammar and json each have their own for patterns, numbers and text
        raise InvalidField(f"json_schema: the engine cannot follow it: {_reason(error)}", field=FIELD) from error


def _check_references(schema: dict[str, Any]) -> None:
    """References stay inside the schema and lead somewhere."""
    for reference in _references(schema):
        seen: set[str] = set()
        while True:
            if not reference.startswith("#"):
                raise InvalidField(f"json_schema: $ref {reference!r} leads out of the schema", field=FIELD)
            if reference in seen:
                raise InvalidField(f"json_schema: $ref {reference!r} leads back to itself", field=FIELD)
            seen.add(reference)
            target: Any = schema
            for part in reference.removeprefix("#").strip("/").split("/"):
                if part and isinstance(target, dict):
                    target = target.get(part.replace("~1", "/").replace("~0", "~"))
            if not isinstance(target, dict) or "$ref" not in target:
                break
            reference = str(target["$ref"])


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def _reason(error: Exception) -> str:
    """The message without the C++ source line that xgrammar puts before it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rpartition(".cc:")[2].lstrip("0123456789: ") if ".cc:" in lines[0] else lines[0]
