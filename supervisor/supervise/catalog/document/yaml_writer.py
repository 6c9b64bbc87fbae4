"""The resolved policy as YAML text: complete, self-contained, always the same bytes.

The text is kept in the run directory, loads to the same policy, and is the input of the digest:
`sha256sum policy.yaml` gives the same. It has its own emitter, since the bytes must not change with
the version of PyYAML.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from .nodes import resolve

WIDTH = 100
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*( [A-Za-z0-9_./()-]+)*|[0-9]+(\.[0-9]+)?(ms|s|m|h)")
_RAW = re.compile("[^ -~\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")


def dump(document: Mapping[str, Any]) -> str:
    """Return a document of mappings, lists, text, numbers, booleans and None as YAML."""
    lines: list[str] = []
    for key, value in document.items():
        _block(f"{_scalar(key)}:", value, 0, lines)
    return "\n".join(lines) + "\n"


def digest(text: str) -> str:
    """Return `sha256:<hex>` of a resolved policy."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _block(head: str, value: Any, indent: int, lines: list[str]) -> None:
    """Write `head value` on one line where it fits and is no deep structure, else as a block."""
    pad = " " * indent
    flow = f"{pad}{head} {inline(value)}"
    deep = indent == 0 and isinstance(value, dict | list | tuple) and len(value) > 0
    if not isinstance(value, dict | list | tuple) or not value or (len(flow) <= WIDTH and not deep):
        lines.append(flow)
    elif isinstance(value, dict):
        lines.append(pad + head)
        for key, inner in value.items():
            _block(f"{_scalar(key)}:", inner, indent + 2, lines)
    else:
        lines.append(pad + head)
        for inner in value:
            _item(inner, indent + 2, lines)


def _item(value: Any, indent: int, lines: list[str]) -> None:
    flow = f"{' ' * indent}- {inline(value)}"
    if len(flow) <= WIDTH or not isinstance(value, dict) or not value:
        lines.append(flow)
        return
    inner: list[str] = []
    for key, held in value.items():
        _block(f"{_scalar(key)}:", held, indent + 2, inner)
    lines.append(f"{' ' * indent}- {inner[0].lstrip()}")
    lines += inner[1:]


def inline(value: Any) -> str:
    """Return a value on one line, in flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(k)}: {inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(inline(item) for item in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if _PLAIN.fullmatch(value) and isinstance(resolve(value), str) and value not in _LEGACY:
        return str(value)
    return _RAW.sub(_escaped, json.dumps(value, ensure_ascii=False))


def _escaped(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# Text under YAML 1.2, booleans under YAML 1.1.
_LEGACY = frozenset(
    word
    for base in ("y", "n", "yes", "no", "on", "off")
    for word in (base, base.upper(), base.capitalize())
)
