"""Types of the values in files that people write: numbers with units, names, closed sections.

A section is a msgspec Struct: its fields are the keys, its annotations say what is valid and what
a key means. JSON Schemas and the tables of the READMEs are generated from them. A type with the
metaclass `Parsed` is written in another form than it has here, such as `30s` for 30.0: `decode`
reads that, `encode` writes it, `schema` describes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from .payload import Json

DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

Schema: TypeAlias = "dict[str, Json]"  # a JSON Schema
OPEN = msgspec.json.schema(dict)  # of any mapping


class Section(Struct, frozen=True, forbid_unknown_fields=True):
    """A closed mapping in a file."""


class Parsed(type):
    """A type with `decode`, `encode` and `schema`.

    Any value is an instance: msgspec asks that of what `decode` returns, which has a plain type.
    """

    def __instancecheck__(cls, value: object) -> bool:
        return True


def closed_object_schema(properties: Mapping[str, Json], **more: Json) -> Schema:
    """Return the JSON Schema of a mapping with these keys and no others."""
    return {**OPEN, "properties": dict(properties), "additionalProperties": False, **more}


def describe_key(text: str) -> Meta:
    """Return the mark that describes a key in one line."""
    return Meta(description=text)


def pattern_mark(regex: str, description: str, *, token: str = "") -> Meta:
    """Return the mark of text that a regular expression matches as a whole.

    Args:
        token: a regular expression for each token, for text that is a list of tokens; a message
            then points at the wrong token.
    """
    extra = {"x-token": token} if token else {}
    return Meta(
        pattern=f"^({regex})$(?!\n)",  # `$` alone matches before a last line break, too
        extra_json_schema={"patternErrorMessage": f"should be {description}", **extra},
    )


def parse_seconds(text: object) -> float:
    """Return the seconds of a text such as `30s`. Raises ValueError."""
    match = DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError("a time needs a unit, such as 30s")
    return float(match[1]) * _SECONDS[match[2]]


def format_seconds(value: float) -> str:
    """Return seconds as they are written: `30s`."""
    if value == int(value):
        return f"{value:.0f}s"
    text = repr(value)
    return f"{value:.12f}s" if "e" in text else f"{text}s"


def _duration_schema() -> Schema:
    return {
        "type": "string",
        "pattern": f"^({DURATION.pattern})$",
        "patternErrorMessage": "should be a time such as 30s",
    }


PERCENTAGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)%")


def parse_share(text: object) -> float:
    """Return the share that a text such as `1%` stands for. Raises ValueError."""
    match = PERCENTAGE.fullmatch(text) if isinstance(text, str) else None
    if match is None or not 0.0 < float(match[1]) <= 100.0:
        raise ValueError("a share is a percentage above 0, such as 1%")
    return float(match[1]) / 100.0


def _share_schema() -> Schema:
    return {
        "type": "string",
        "pattern": f"^({PERCENTAGE.pattern})$",
        "patternErrorMessage": "should be a percentage such as 1%",
    }


# Bare numbers in YAML count steps, numbers with a unit are times.
_STEPS = {"x-unit": "steps"}
Steps = Annotated[int, Meta(ge=0, extra_json_schema=_STEPS)]
SomeSteps = Annotated[int, Meta(ge=1, extra_json_schema=_STEPS)]
Count = Annotated[int, Meta(ge=1)]

if TYPE_CHECKING:
    Seconds = float
    Share = float
    Window = int | float
else:

    class Seconds(metaclass=Parsed):
        """A time: seconds here, a text such as `30s` in a file."""

        decode = staticmethod(parse_seconds)
        encode = staticmethod(format_seconds)
        schema = staticmethod(_duration_schema)

    class Share(metaclass=Parsed):
        """A part of a whole: 0.01 here, a text such as `1%` in a file."""

        decode = staticmethod(parse_share)
        encode = staticmethod(lambda value: f"{100.0 * value:.12g}%")
        schema = staticmethod(_share_schema)

    class Window(metaclass=Parsed):
        """A number of steps, an int, or a time in seconds, a float."""

        @staticmethod
        def decode(value):
            if type(value) is int and value >= 1:
                return value
            return parse_seconds(value)

        @staticmethod
        def encode(value):
            return value if isinstance(value, int) else format_seconds(value)

        @staticmethod
        def schema():
            return {"anyOf": [{"type": "integer", "minimum": 1, **_STEPS}, _duration_schema()]}


# The unit of counts that are not the job's own steps anyway.
Unit = Annotated[
    Literal["rows", "steps"],
    describe_key(
        "of its counts: rows are frames or logged rows that hold the metric, steps are the job's"
    ),
]
Severity = Literal["SEV0", "SEV1", "SEV2"]
RUNBOOK = "[a-z][a-z0-9-]{0,63}"
RunbookName = Annotated[
    str, pattern_mark(RUNBOOK, "a runbook's name, in lower case, such as rollback-and-rewarm")
]
