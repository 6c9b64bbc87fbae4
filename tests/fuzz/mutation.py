"""Changes that a hostile or broken writer could make: to bytes, to JSON, to records of ours.

Every function takes a `random.Random`, so that one number gives one change.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import struct
import zlib
from random import Random
from typing import Any

NUMBERS = (0, 1, 2, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-310, 1e308, -1e308, math.nan, math.inf, -math.inf, 2.0**63)
ODD: tuple[Any, ...] = (
    *(None, True, False, *NUMBERS, *FLOATS, -1, -(2**63), 10**30, 10**400),
    *("", "x", "NaN", "\ud800", "a\x00b", "\x1b[2J", "é" * 40, "x" * 3000),
    *("../../../etc/passwd", "rank", "-1", "9" * 400),
    *([], [[]], [None], {}, {"": {}}, {"data": None}, [1, "a", None, {}]),
)


def odd(chance: Random) -> Any:
    """Return a value that hardly anybody expects."""
    return copy.deepcopy(chance.choice(ODD))


def nested(chance: Random) -> Any:
    """Return something deeper than anybody reads."""
    value: Any = 1
    for _ in range(chance.choice((10, 20, 70, 300, 480))):
        value = [value] if chance.random() < 0.5 else {"a": value}
    return value


def twisted(document: Any, chance: Random) -> Any:
    """Return JSON with one to three of its nodes changed."""
    document = copy.deepcopy(document)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = list(_places(document))
        if not places:
            return odd(chance)
        parent, key = chance.choice(places)
        how = chance.randrange(8)
        if how == 0 and isinstance(parent, dict):
            del parent[key]
        elif how == 1:
            parent[key] = nested(chance)
        elif how == 2 and isinstance(parent, dict):
            parent[chance.choice(("new", "", "\ud800", str(key) * 2))] = odd(chance)
        elif how == 3:
            other, there = chance.choice(places)
            parent[key] = copy.deepcopy(other[there])
        elif how == 4 and isinstance(parent[key], list):
            parent[key] *= chance.choice((0, 2, 40))
        else:
            parent[key] = odd(chance)
    return document


def _places(value: Any) -> Any:
    todo = [value] if isinstance(value, (dict, list)) else []
    while todo:
        here = todo.pop()
        keys = list(here) if isinstance(here, dict) else range(len(here))
        for key in keys:
            yield here, key
            if isinstance(here[key], (dict, list)):
                todo.append(here[key])


def dumped(document: Any) -> bytes:
    return json.dumps(document).encode()


def reworded(raw: bytes, chance: Random) -> bytes:
    """Return JSON with one to three of its nodes changed, anything else with bytes changed."""
    try:
        return dumped(twisted(json.loads(raw), chance))
    except (ValueError, RecursionError):
        return bitten(raw, chance)


def bitten(raw: bytes, chance: Random) -> bytes:
    """Return bytes with a few of them changed, doubled, dropped or cut off."""
    data = bytearray(raw)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(data) + 1)
        size = chance.choice((1, 1, 2, 4, 8, 30, 300))
        how = chance.randrange(7)
        if how == 0:
            data[at : at + size] = b""
        elif how == 1:
            data[at:at] = data[at : at + size]
        elif how == 2:
            data[at:at] = (
                chance.choice((b"\0", b"\n", b"\xff", b'"', b"[" * 9, b"\xed\xa0\x80")) * size
            )
        elif how == 3 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif how == 4:
            data[at : at + size] = chance.randbytes(size)
        elif how == 5:
            del data[at:]
        else:
            data += bytes(chance.choice((1, 50, 5000)))
    return bytes(data)


# ── the journal ───────────────────────────────────────────────────────────────────────────────────


def records(raw: bytes) -> list[tuple[int, bytes]]:
    """Return kind and payload of each record of a whole segment."""
    found, at = [], 16
    while at + 13 <= len(raw):
        length, _, _, kind = struct.unpack_from("<IIIB", raw, at)
        found.append((kind, raw[at + 13 : at + 13 + length]))
        at += 13 + length
    return found


def segment(rows: list[tuple[int, bytes]], first: int = 0) -> bytes:
    """Return a whole segment of the journal, with good checksums."""
    raw = bytearray(b"SUPVJRN1" + struct.pack("<Q", first & (2**64 - 1)))
    for number, (kind, payload) in enumerate(rows, first):
        body = struct.pack("<IB", number & 0xFFFFFFFF, kind & 0xFF) + payload
        raw += struct.pack("<II", len(payload), zlib.crc32(body)) + body
    return bytes(raw)


def of_journal(raw: bytes, chance: Random) -> bytes:
    """Return a segment whose records are changed under good checksums, or whose bytes are."""
    rows = records(raw)
    for _ in range(chance.choice((0, 1, 1, 2, 3)) if rows else 0):
        at = chance.randrange(len(rows))
        kind, payload = rows[at]
        how = chance.randrange(8)
        if how == 0:
            del rows[at]
        elif how == 1:
            rows.insert(at, rows[chance.randrange(len(rows))])
        elif how == 2:
            rows[at] = (chance.choice((*range(13), 255)), payload)
        elif kind == 1:
            rows[at] = (1, _frame(payload, chance))
        else:
            rows[at] = (kind, reworded(payload, chance))
        if not rows:
            break
    first = 0 if chance.random() < 0.95 else chance.choice(NUMBERS)
    raw = segment(rows, first)
    return raw if chance.random() < 0.6 else bitten(raw, chance)


def _frame(payload: bytes, chance: Random) -> bytes:
    data = bytearray(payload)
    if chance.random() < 0.3 or len(data) < 26:
        return bitten(payload, chance)
    at, form = chance.choice(((0, "<Q"), (8, "<Q"), (16, "<I"), (20, "<I"), (24, "<H")))
    if chance.random() < 0.5:
        bits = 8 * struct.calcsize(form)
        struct.pack_into(form, data, at, chance.choice(NUMBERS) & (2**bits - 1))
    elif len(data) >= 35:
        struct.pack_into("<d", data, len(data) - 8, chance.choice(FLOATS))
    return bytes(data)


# ── the audit log ─────────────────────────────────────────────────────────────────────────────────


def of_audit(raw: bytes, chance: Random) -> bytes:
    """Return a log forged with good digests, or with bytes changed."""
    try:
        rows = [json.loads(line[65:]) for line in raw.splitlines()]
    except (ValueError, RecursionError):
        return bitten(raw, chance)
    how = chance.randrange(10)
    if how == 0:
        chance.shuffle(rows)
    elif how < 7 and rows:
        for _ in range(chance.choice((1, 1, 2))):
            at = chance.randrange(len(rows))
            rows[at] = twisted(rows[at], chance)
    elif how == 7 and rows:
        del rows[chance.randrange(len(rows))]
    raw = chained(rows, keep=chance.random() < 0.2)
    return raw if chance.random() < 0.7 else bitten(raw, chance)


def chained(rows: list[Any], *, keep: bool = False) -> bytes:
    """Return a log of these records with good digests; `keep` leaves their own numbers."""
    out, prev = bytearray(), None
    for seq, row in enumerate(rows):
        if isinstance(row, dict) and not keep:
            row = {**row, "seq": seq} | ({"prev": prev} if prev else {})
        body = dumped(row)
        prev = hashlib.sha256(b"\0" + body).hexdigest()
        out += prev.encode() + b" " + body + b"\n"
    return bytes(out)
