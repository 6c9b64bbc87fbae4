"""The differences of two policies: parts added, removed or changed, and the effect of each.

Works on resolved documents, so it does not matter which file or pack defines a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.model.decisions import ACTING_MODES, MODES, SEVERITIES

Document = Mapping[str, Any]

# The effect of a change, most severe first.
ACTS, ACTS_NOT = "acts where it did not", "no longer acts"
WATCHES, BLIND = "watches more", "no longer watches"
MORE, LESS = "may act more often", "may act less often"
LOOSER, TIGHTER = "threshold loosened", "threshold tightened"
WORSE, MILDER = "more severe", "less severe"
LATER, SOONER = "fires later", "fires sooner"
MUTED_MORE, MUTED_LESS = "muted more", "muted less"
OTHER = "changed"
ORDER = (
    *(ACTS, ACTS_NOT, BLIND, MORE, LESS, WORSE, MILDER, LOOSER, TIGHTER, LATER, SOONER, MUTED_MORE),
    *(MUTED_LESS, WATCHES, OTHER),
)

SECTIONS = {
    "detectors": "detector",
    "rules": "rule",
    "runbooks": "runbook",
    "budgets": "budget",
    "notify": "notifier",
}
UPPER = ("gt", "gte", "count_gte", "share_gte", "slope_per_1k_gt")  # larger: harder to breach
LOWER = ("lt", "lte", "slope_per_1k_lt")
WAITS = ("for", "min", "p99_multiple")


@dataclass(frozen=True, slots=True)
class Change:
    """One difference.

    Attributes:
        part: `rule loss_spike.coupled`, `budget all`, `mode`. key: what of it, "" for all of it.
        old, new: the values, None where there is none. effect: one of ORDER.
    """

    part: str
    key: str
    old: Any
    new: Any
    effect: str


def compare_policies(old: Document, new: Document) -> list[Change]:
    """Return the differences in behaviour; names and summaries are ignored."""
    changes = list(_sections(old, new))
    return sorted(changes, key=lambda change: (ORDER.index(change.effect), change.part, change.key))


def _sections(old: Document, new: Document) -> Iterator[Change]:
    for section in dict.fromkeys((*old, *new)):
        if section in ("version", "policy", "summary"):
            continue
        a, b = old.get(section), new.get(section)
        if section in SECTIONS:
            yield from _parts(section, _named(section, a), _named(section, b), old, new)
        elif section == "inhibit":
            shared_ids = {rule["id"] for rule in old["rules"]} & {
                rule["id"] for rule in new["rules"]
            }
            yield from _inhibitions(a or [], b or [], shared_ids)
        elif section == "mode" and a != b:
            yield Change("mode", "", a, b, _mode(str(a), str(b)))
        else:
            for key, was, now in _leaves(a, b, ""):
                yield Change(section, key, was, now, OTHER)


def _named(section: str, section_value: Any) -> dict[str, Any]:
    if section == "rules":
        return {rule["id"]: rule for rule in section_value or ()}
    return dict(section_value or {})


def _mode(old: str, new: str) -> str:
    if (old in ACTING_MODES) != (new in ACTING_MODES):
        return ACTS if new in ACTING_MODES else ACTS_NOT
    return WATCHES if MODES.index(new) > MODES.index(old) else OTHER


def _parts(
    section: str, a: dict[str, Any], b: dict[str, Any], old: Document, new: Document
) -> Iterator[Change]:
    for name in dict.fromkeys((*a, *b)):
        part = f"{SECTIONS[section]} {name}"
        if name not in b:
            yield Change(part, "", a[name], None, _removed(section, a[name], old))
        elif name not in a:
            yield Change(part, "", None, b[name], _added(section, b[name], new))
        else:
            for key, was, now in _leaves(a[name], b[name], ""):
                yield Change(part, key, was, now, _effect(section, key, was, now, a[name], b[name]))


def _acts(rule: Any, document: Document) -> bool:
    return bool(rule.get("run")) and (rule.get("mode") or document.get("mode")) in ACTING_MODES


def _removed(section: str, section_value: Any, document: Document) -> str:
    if section == "rules":
        return ACTS_NOT if _acts(section_value, document) else BLIND
    return BLIND if section == "detectors" else OTHER


def _added(section: str, section_value: Any, document: Document) -> str:
    if section == "rules":
        return ACTS if _acts(section_value, document) else WATCHES
    return WATCHES if section == "detectors" else OTHER


def _leaves(a: Any, b: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield `(key, old, new)` for what is different; lists are compared as a whole."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in dict.fromkeys((*a, *b)):
            yield from _leaves(a.get(key), b.get(key), f"{path}.{key}" if path else str(key))
    elif a != b or isinstance(a, bool) is not isinstance(b, bool):
        yield path, a, b


def _effect(section: str, key: str, old: Any, new: Any, a: Any, b: Any) -> str:
    if section == "rules":
        return _of_rule(key, old, new)
    if section == "budgets":
        grown = _is_more(old, new)
        rises = grown if key == "max" else None if grown is None else not grown
        return OTHER if rises is None else MORE if rises else LESS
    if section == "detectors":
        leaf = key.rpartition(".")[2]
        if leaf in (*UPPER, *LOWER, *WAITS):
            if (old is None) != (new is None):  # another comparator: what it watches is another
                return OTHER
            grown = _is_more(old, new)
            if grown is None:
                return OTHER
            if leaf in WAITS:
                return LATER if grown else SOONER
            return LOOSER if grown == (leaf in UPPER) else TIGHTER
    return OTHER


def _of_rule(key: str, old: Any, new: Any) -> str:
    if key == "run":
        return ACTS if old is None else ACTS_NOT if new is None else OTHER
    if key == "sev":
        return WORSE if SEVERITIES.index(new) < SEVERITIES.index(old) else MILDER
    if key == "for":
        return LATER if _is_more(old, new) else SOONER
    if key == "mode":
        return (
            ACTS_NOT
            if new in ("observe", "shadow") and old in (None, *ACTING_MODES)
            else (ACTS if new in (None, *ACTING_MODES) else OTHER)
        )
    return OTHER


def _is_more(old: Any, new: Any) -> bool | None:
    """Return whether a number, or a time, grew; None when they cannot be compared."""
    a, b = _number(old), _number(new)
    return None if a is None or b is None else b > a


def _number(value: Any) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and value.endswith("s"):  # resolved times are all in seconds
        try:
            return float(value[:-1])
        except ValueError:
            return None
    return None


def _inhibitions(old: list[Any], new: list[Any], shared_ids: set[str]) -> Iterator[Change]:
    """Yield the changed (muting, muted) pairs; their grouping does not matter.

    Rules that only one policy has (not in `both`) are skipped: their own change covers it.
    """
    a, b = _mutes(old), _mutes(new)
    for muting, muted in dict.fromkeys((*a, *b)):
        if muted not in shared_ids:
            continue
        if (muting, muted) not in b:
            yield Change(f"rule {muted}", "muted by", muting, None, MUTED_LESS)
        elif (muting, muted) not in a:
            yield Change(f"rule {muted}", "muted by", None, muting, MUTED_MORE)


def _mutes(inhibits: list[Any]) -> dict[tuple[str, str], None]:
    mutes: dict[tuple[str, str], None] = {}
    for inhibit in inhibits:
        for muting in (inhibit.get("by_rule"), *(inhibit.get("by_state") or ())):
            if muting:
                mutes.update(dict.fromkeys((muting, muted) for muted in inhibit["mute"]))
    return mutes
