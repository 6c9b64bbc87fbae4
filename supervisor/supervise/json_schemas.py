"""JSON Schema, draft-07, of the classes of what we write: generated, their docstrings included.

The description of a field is its entry under `Attributes:` in the docstring of its class.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

_ENTRY = re.compile(r"^    (\w+): (.+(?:\n {8,}.+)*)", re.M)
_NUMBER = {"type": "number"}
# JSON has no form for numbers that are not finite: they are text in what we write.
_ANY_NUMBER = {"anyOf": [_NUMBER, {"enum": ["NaN", "+Inf", "-Inf"]}]}


def published_schema(root: type[msgspec.Struct], title: str) -> dict[str, Any]:
    """Return the schema of a class, and of the classes in its module that it refers to."""
    _, schemas = msgspec.json.schema_components(
        [root], schema_hook=_open_object, ref_template="#/definitions/{name}"
    )
    classes = vars(sys.modules[root.__module__])
    definitions = {name: _described(classes.get(name), body) for name, body in schemas.items()}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": title}
    body = definitions.pop(root.__name__)
    return {**head, **body, "definitions": definitions}


def _open_object(owner: type) -> dict[str, Any]:
    """Return the schema of a class that keeps an object as it came."""
    if not issubclass(owner, Mapping):
        raise NotImplementedError
    return msgspec.json.schema(dict)


def _described(owner: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one class with the text of its docstring at each field."""
    body = {key: _with_any_number(part) for key, part in body.items() if key != "title"}
    if "description" in body:  # as msgspec has it: its versions indent it differently
        body["description"] = _summary(body["description"])
    if not (isinstance(owner, type) and issubclass(owner, msgspec.Struct)):
        return body
    descriptions: dict[str, str] = {}
    for parent in reversed(owner.__mro__):
        if issubclass(parent, msgspec.Struct) and parent.__doc__:
            descriptions |= _ENTRY.findall(inspect.cleandoc(parent.__doc__))
    body["description"] = _summary(owner.__doc__ or "")
    names = zip(owner.__struct_encode_fields__, owner.__struct_fields__, strict=True)
    for key, name in names:
        if name in descriptions:
            body["properties"][key]["description"] = " ".join(descriptions[name].split())
    return body


def _summary(docstring: str) -> str:
    """Return a docstring up to its `Attributes:`."""
    return inspect.cleandoc(docstring).partition("\n\nAttributes:")[0]


def _with_any_number(schema: Any) -> Any:
    """Return a schema of draft-07 in which a number may be the text of one that is not finite."""
    if schema == _NUMBER:
        return dict(_ANY_NUMBER)  # a field writes its description into it
    if isinstance(schema, dict):
        if "prefixItems" in schema:  # a later draft's spelling of a tuple
            schema = dict(schema)
            schema["items"] = schema.pop("prefixItems")
        return {key: _with_any_number(part) for key, part in schema.items()}
    if isinstance(schema, list):
        return [_with_any_number(part) for part in schema]
    return schema
