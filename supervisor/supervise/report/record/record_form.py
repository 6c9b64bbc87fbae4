"""The published form of the record: JSON Schema, draft-07. `make docs` writes it to `docs/`."""

from __future__ import annotations

from typing import Any

SCHEMA_ID = "supervise/record/v1"
LATER = ("citations",)  # records of the first versions do not have them
UNKNOWN = {"$ref": "#/definitions/unknown"}
TEXT, NUMBER, COUNT = {"type": "string"}, {"type": "number"}, {"type": "integer"}
ANY_OBJECT = {"type": "object"}


def _or_unknown(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, UNKNOWN]}


def _list(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _form(about: str, **fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": about,
        "type": "object",
        "required": [name for name in fields if name not in LATER],
        "properties": fields,
        "additionalProperties": False,
    }


def _monitor() -> dict[str, Any]:
    return _form(
        "a signal that rules of the policy read",
        signal=TEXT,
        module={**TEXT, "description": "what of the job it watches, and who measures it"},
        meaning=_or_unknown(TEXT),
        unit=_or_unknown(TEXT),
        formula=_or_unknown(TEXT),
        formula_version=_or_unknown(TEXT),
        rules=_list(TEXT),
        faults={**_list(TEXT), "description": "injected faults that are made to move it"},
        present_in=_or_unknown({**NUMBER, "description": "share of the steps that hold it"}),
        healthy_baseline=_or_unknown(
            _form(
                "values of steps without an open incident",
                p05=NUMBER,
                median=NUMBER,
                p95=NUMBER,
                values=COUNT,
            )
        ),
    )


def _rule() -> dict[str, Any]:
    return _form(
        "a rule of the policy in force at the end",
        rule=TEXT,
        severity=TEXT,
        mode=TEXT,
        condition=TEXT,
        thresholds={"type": "object", "additionalProperties": TEXT},
        threshold_source=TEXT,
        response={**TEXT, "description": "the runbook that it runs, hold, or nothing"},
        stops={"type": "boolean", "description": "the response can stop the job or hold it"},
        fired=COUNT,
        state=TEXT,
        lead_time=_or_unknown(ANY_OBJECT),
        blind_to=_list(TEXT),
    )


def _incident() -> dict[str, Any]:
    return _form(
        "an incident",
        incident=TEXT,
        severity=TEXT,
        rule=TEXT,
        step=COUNT,
        headline=TEXT,
        end=_or_unknown(TEXT),
        end_step=_or_unknown(COUNT),
    )


def _action() -> dict[str, Any]:
    return _form(
        "an action on the job",
        id=TEXT,
        action=TEXT,
        runbook=_or_unknown(TEXT),
        incident=_or_unknown(TEXT),
        step=COUNT,
        outcome={"enum": ["done", "failed", "in doubt"]},
        observed=ANY_OBJECT,
        record=COUNT,
    )


def _recovery() -> dict[str, Any]:
    return _form(
        "a runbook of the policy",
        runbook=TEXT,
        procedure=_list(TEXT),
        used=COUNT,
        verified=COUNT,
        failed=COUNT,
        shown=_or_unknown(_list(ANY_OBJECT)),
    )


def _subject() -> dict[str, Any]:
    """Return the fields of what the record is about."""
    return {
        "schema": {"const": SCHEMA_ID},
        "made_by": _form(
            "the installation that wrote the record",
            version=TEXT,
            formulas_sha256=TEXT,
            shown_sha256=TEXT,
        ),
        "run": _form(
            "the run",
            id=TEXT,
            created=TEXT,
            host=TEXT,
            command=_list(TEXT),
            previous=_or_unknown(TEXT),
            state=TEXT,
            exit_code=_or_unknown(COUNT),
            first_step=_or_unknown(COUNT),
            last_step=_or_unknown(COUNT),
            steps_made=_or_unknown(COUNT),
            tokens=_or_unknown(NUMBER),
            attempts=COUNT,
            ranks=COUNT,
        ),
        "policy": _form(
            "the policy",
            name=TEXT,
            mode=TEXT,
            digest=TEXT,
            reloads=_list(ANY_OBJECT),
        ),
        "identity": _form(
            "what the job consisted of from its first step on",
            first=_or_unknown(ANY_OBJECT),
            changes=_list(ANY_OBJECT),
        ),
    }


def _watching() -> dict[str, Any]:
    """Return the fields of what watched the run, and of what was done."""
    return {
        "monitors": _or_unknown(_list(_monitor())),
        "rules": _or_unknown(_list(_rule())),
        "fault_injection": _form(
            "how the monitors were tested",
            in_this_run=_list(ANY_OBJECT),
            design=_list(ANY_OBJECT),
        ),
        "citations": {
            **_list(ANY_OBJECT),
            "description": "drill suites and canary trials that the run or its policy names",
        },
        "incidents": _list(_incident()),
        "interventions": _form(
            "what changed the job",
            by_name={"type": "object", "additionalProperties": ANY_OBJECT},
            safeguards={"type": "object", "additionalProperties": COUNT},
            operators=_list(ANY_OBJECT),
            actions=_list(_action()),
        ),
        "recovery": _or_unknown(_list(_recovery())),
    }


def _result() -> dict[str, Any]:
    """Return the fields of what was lost, not seen, and not claimed."""
    return {
        "gaps": _form(
            "where nothing was seen",
            unwatched_s=_list(NUMBER),
            frames_lost=_or_unknown(COUNT),
            steps_without_frame=_or_unknown(COUNT),
            blind_share=_or_unknown(NUMBER),
            blind_rules=_list(ANY_OBJECT),
            inactive_rules=_list(TEXT),
            journal=TEXT,
        ),
        "cost": _form(
            "what incidents and interventions took from the run",
            steps=_or_unknown(COUNT),
            skipped_updates=_or_unknown(COUNT),
            tokens=_or_unknown(NUMBER),
            paused_s=NUMBER,
            down_s=_or_unknown(NUMBER),
            device_hours=_or_unknown(NUMBER),
            device_hours_of_run=_or_unknown(NUMBER),
            probe_share=_or_unknown(NUMBER),
        ),
        "limits": _list(TEXT),
        "audit": _form(
            "the record that all of this is read from",
            status=TEXT,
            records=COUNT,
            head=TEXT,
            parts=_list(_form("a part of the run", part=TEXT, status=TEXT, text=TEXT)),
            not_checked=_list(TEXT),
        ),
    }


def schema() -> dict[str, Any]:
    """Return the schema of a record."""
    unknown = _form("a field that is not known, with the reason", unknown=TEXT)
    fields = {**_subject(), **_watching(), **_result()}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "The stability record of a run of supervise",
        **_form("what an auditor checks of a run", **fields),
        "definitions": {"unknown": unknown},
    }
