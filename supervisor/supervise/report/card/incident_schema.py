"""The JSON Schema, draft-07, of `incident.json`: what other programs may rely on.

A version stays as it is: another meaning, or a key that is gone, needs the next one. New keys may
come. `make docs` writes it to `policies/incident.schema.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .standing import MEANINGS

VERSION = "supervise/incident/v1"

TEXT: Mapping[str, Any] = {"type": "string"}
WHOLE: Mapping[str, Any] = {"type": "integer"}
FLAG: Mapping[str, Any] = {"type": "boolean"}
# "NaN", "+Inf" and "-Inf" are numbers that JSON has no form for.
NUMBER: Mapping[str, Any] = {"anyOf": [{"type": "number"}, {"enum": ["NaN", "+Inf", "-Inf"]}]}


def _maybe(part: Mapping[str, Any], meaning: str) -> dict[str, Any]:
    return {"description": meaning, "anyOf": [dict(part), {"type": "null"}]}


def _some(part: Mapping[str, Any], meaning: str) -> dict[str, Any]:
    return {"description": meaning, "type": "array", "items": dict(part)}


def _meant(part: Mapping[str, Any], meaning: str) -> dict[str, Any]:
    return {"description": meaning, **part}


def _record(properties: Mapping[str, Any], meaning: str = "") -> dict[str, Any]:
    head = {"description": meaning} if meaning else {}
    return {**head, "type": "object", "required": list(properties), "properties": dict(properties)}


MOMENT: Mapping[str, Any] = {
    "record": _meant(WHOLE, "number of the audit record"),
    "step": _meant(WHOLE, "newest step then, -1 before the first"),
    "attempt": WHOLE,
    "wall": _maybe(TEXT, "UTC, ISO-8601"),
}
SENTENCE = "one sentence; it begins with `unknown` and why where nothing is on record"


def _timed(meaning: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    return _record({**MOMENT, **properties}, meaning)


def _series() -> dict[str, Any]:
    return _record(
        {
            "rank": WHOLE,
            "steps": _some(WHOLE, "step of each point, in the order of the frames"),
            "attempts": _some(WHOLE, "attempt of each point; it grows at a rollback or restart"),
            "opened_at": _meant(WHOLE, "index of the first point after the incident opened"),
            "stride": _meant(WHOLE, "frames that a point after that stands for, the worst of them"),
            "window": _meant(
                {"type": "array", "items": dict(WHOLE), "minItems": 2, "maxItems": 2},
                "first and last step",
            ),
            "signals": {
                "description": "metric id -> one value per point; null is absent",
                "type": "object",
                "additionalProperties": {
                    "type": "array",
                    "items": {"anyOf": [*NUMBER["anyOf"], {"type": "null"}]},
                },
            },
        }
    )


def _move() -> dict[str, Any]:
    return _record(
        {
            "metric": TEXT,
            "before": _meant(NUMBER, "median well before the first breach"),
            "peak": _meant(NUMBER, "farthest value since, or the first that is not finite"),
            "peak_step": WHOLE,
            "first_step": _meant(WHOLE, "first step away from the level"),
            "ratio": _maybe(NUMBER, "peak / before"),
        }
    )


def _condition() -> dict[str, Any]:
    return _record(
        {
            "detector": TEXT,
            "rule": TEXT,
            "severity": _meant(TEXT, "of the rule"),
            "step": _meant(WHOLE, "when the rule fired"),
            "breach": FLAG,
            "code": {"enum": ["OK", "UNKNOWN", "BREACH"]},
            "metric": _maybe(TEXT, "id; null for detectors of several or of time"),
            "value": _maybe(NUMBER, "of the metric"),
            "measure": _meant(TEXT, "what is compared with the limit: value, z, ratio, ..."),
            "measured": _maybe({"anyOf": [*NUMBER["anyOf"], TEXT]}, "that number"),
            "limit": _maybe({"anyOf": [*NUMBER["anyOf"], TEXT]}, "threshold"),
            "baseline": _maybe(NUMBER, "level before"),
            "text": _meant(TEXT, "the reading in words"),
            "past": _maybe(
                _record({"measured": NUMBER, "step": WHOLE, "steps": WHOLE}),
                "how near it was to the limit in so many frames before; null: not known",
            ),
        }
    )


def _action() -> dict[str, Any]:
    return _timed(
        "an action that was intended",
        {
            "id": TEXT,
            "verb": TEXT,
            "runbook": TEXT,
            "args": {"type": "object"},
            "touches_job": FLAG,
            "undo": _meant(FLAG, "it takes an earlier one back"),
            "ok": _maybe(FLAG, "null: no outcome on record, so its effect is unknown"),
            "outcome": TEXT,
            "result": _meant({"type": "object"}, "what was observed, never what was intended"),
            "took_s": _maybe(NUMBER, "seconds"),
        },
    )


def _delivered() -> dict[str, Any]:
    return _record({"ok": FLAG, "tries": _maybe(WHOLE, "attempts"), "text": TEXT})


def _head() -> dict[str, Any]:
    return {
        "schema": {"const": VERSION},
        "id": _meant(TEXT, "inc-1, inc-2, ... of its run"),
        "severity": {"enum": ["SEV0", "SEV1", "SEV2"]},
        "title": _meant(TEXT, "what it is, in words"),
        "state": {"enum": list(MEANINGS)},
        "state_means": TEXT,
        "final": _meant(FLAG, "it is closed: nothing here changes any more"),
        "run": _record(
            {
                **dict.fromkeys(
                    ("id", "directory", "host", "policy", "policy_digest", "mode"), TEXT
                ),
                "command": _some(TEXT, "of the job, without secrets"),
                "phase": _meant(TEXT, "whether the run is in progress, as a sentence"),
            }
        ),
        "opened": _timed("when it opened", {}),
        "breach_step": _meant(WHOLE, "first step that may be part of it"),
        "closed": _maybe(_timed("", {"text": TEXT}), "when and why it closed"),
        "updated": _timed("newest record in it", {}),
        "rules": _some(
            _timed(
                "a rule that fired",
                {
                    "rule": TEXT,
                    "title": TEXT,
                    "severity": TEXT,
                    "rank": WHOLE,
                    "when": _meant(TEXT, "its expression"),
                    "where": _meant(TEXT, "file:line:column"),
                    "runbook": _maybe(TEXT, "what it runs"),
                },
            ),
            "in the order in which they fired",
        ),
        "scope": _record(
            {
                "rank": _maybe(WHOLE, "null: not known, or of none"),
                "shards": _some(TEXT, "of data, left out or suspect"),
                "place": _maybe(TEXT, "module or place that a detector names"),
            }
        ),
    }


def _sentences() -> dict[str, Any]:
    return {
        "what": _record(
            {
                "text": _meant(TEXT, SENTENCE),
                "moves": _some(_move(), "signals that left their level, the first one first"),
                "band": _maybe(
                    {"type": "object"}, "`level` of the loss before, `limit` to be back"
                ),
            }
        ),
        "cause": _record(
            {
                "text": _meant(TEXT, SENTENCE),
                "kind": {
                    "enum": [
                        *("drill", "error", "standstill", "operator", "diagnosis", "order"),
                        "unknown",
                    ]
                },
                "known": FLAG,
            }
        ),
        "did": _record({"text": _meant(TEXT, SENTENCE), "acted": _maybe(FLAG, "null: in doubt")}),
        "cost": _record(
            {
                "text": _meant(TEXT, SENTENCE),
                "steps_repeated": _meant(WHOLE, "undone, to be made again"),
                "steps_lost": _meant(WHOLE, "whose progress is gone: the job's loop went on"),
                "paused_s": NUMBER,
                "skipped": _meant(WHOLE, "updates"),
                "relaunches": WHOLE,
                "budgets": _meant({"type": "object"}, "name -> used/limit at the last action"),
            }
        ),
        "proof": _record(
            {
                "text": _meant(TEXT, SENTENCE),
                "verified": _meant(FLAG, "the actions were verified, and it did not come back"),
                "rejoined_step": _maybe(WHOLE, "first step with the loss back in its band"),
            }
        ),
        "next": _record({"text": _meant(TEXT, "what a person should do, with commands to paste")}),
    }


def _numbers() -> dict[str, Any]:
    return {
        "loss": _record({"metric": TEXT, "spark": _meant(TEXT, "⟲ is a rollback or restart")}),
        "series": _maybe(_series(), "null: no frame is known"),
        "conditions": _some(_condition(), "detectors of the rules, breaches first"),
        "diagnosis": _maybe({"type": "object"}, "class of the loss, advice, answers"),
        "actions": _some(_action(), "in order"),
        "approval": _maybe(
            _timed(
                "",
                {
                    "id": TEXT,
                    "runbook": TEXT,
                    "plan": _some({"type": "object"}, "verbs and arguments"),
                    "timeout_s": NUMBER,
                    "on_timeout": TEXT,
                    "answer": _maybe(TEXT, "null: none yet"),
                    "answer_text": TEXT,
                },
            ),
            "newest request to a person",
        ),
        "verification": _some(
            _timed("", {"what": TEXT, "text": TEXT}), "what was verified, refused or withdrawn"
        ),
    }


def _history() -> dict[str, Any]:
    return {
        "suppressed": _some(
            _timed(
                "",
                {
                    "rule": TEXT,
                    "text": TEXT,
                    "by": TEXT,
                    "runbook": TEXT,
                    "would": {"type": "array"},
                },
            ),
            "what was not done, and what kept it",
        ),
        "failures": _some(
            _record({"text": TEXT, "type": TEXT, "cls": TEXT, "traceback": TEXT}),
            "how processes ended, the cause first",
        ),
        "messages": _some(
            _timed(
                "",
                {
                    "severity": TEXT,
                    "title": TEXT,
                    "next": TEXT,
                    "delivered": _some(_delivered(), "per channel"),
                },
            ),
            "what people were sent",
        ),
        "timeline": _some(
            _timed("", {"kind": TEXT, "since_s": NUMBER, "text": TEXT}), "all its records"
        ),
        "evidence": _record(
            {
                "directory": TEXT,
                "bundles": _some(
                    _record(
                        {
                            "path": _meant(TEXT, "relative to the run"),
                            "sha256": _meant(TEXT, "of its manifest"),
                            "files": _some(TEXT, "names"),
                            "missing": _some(TEXT, "what could not be read"),
                        }
                    ),
                    "one per snapshot",
                ),
            }
        ),
        "replay": _record(
            {
                "decisions": _meant(TEXT, "command that proves the decisions from the journal"),
                "why_not": _meant(TEXT, "command that explains the rule at that step"),
            }
        ),
    }


def schema() -> dict[str, Any]:
    """Return the schema."""
    properties = {**_head(), **_sentences(), **_numbers(), **_history()}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "An incident of supervise",
        **_record(properties),
    }
