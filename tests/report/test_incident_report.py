"""The story of an incident, from the records alone."""

from __future__ import annotations

import pytest

from supervise.catalog import load_policy
from supervise.core.model import format_readings
from supervise.report import incident_report, receipt, render
from supervise.store import audit


@pytest.fixture
def told(keep_run, make_frames, small):
    """A function that tells the last incident of `(losses, ...)` as data and as lines."""

    def tell(*losses, incident=None, **options):
        run = keep_run(make_frames(0, *losses), **options)
        records = list(audit.read(run.audit_path))
        policy = load_policy(run.policy_path)
        chosen = incident or incident_report.ids(records)[-1]
        found = incident_report.collect(
            records, chosen, {policy.digest: policy}, "the run is in progress"
        )
        return found, "\n".join(render.lines(found)), records

    return tell


SPIKE = (*[2.0 + 0.01 * (i % 5) for i in range(40)], 8.0, 7.0, *[2.0] * 40)


def test_the_end_and_the_kind_of_trouble_are_told(told):
    """Closed, and the four questions with their answers where the record has them."""
    found, text, records = told(*SPIKE)
    closed = [r for r in records if r["kind"] == "incident" and r["data"]["what"] == "closed"][-1]

    assert (found["end"]["how"], found["end"]["record"]) == ("closed", closed["seq"])
    assert found["end"]["reason"] in text
    assert found["spike"] == closed["data"].get("spike")
    spike = {
        "class": "data event",
        "advice": "look at the data",
        "questions": {"rejoined": {"answer": "no", "text": "3 above the trend"}},
    }
    lines = list(render.lines(found | {"spike": spike}))
    assert lines[lines.index("diagnosis") + 1 :][:3] == [
        "  data event",
        "  1 rejoined: no: 3 above the trend",
        "  advice: look at the data",
    ]


def test_two_runbooks_of_an_incident_are_two(told, small, tmp_path):
    """The ladder's next rung has its own actions and its own verification."""
    text = small.read_text().replace("steps: [{lr", "steps: [snapshot, {lr")
    books, rest = text.split("budgets:")
    body = books.split("  calm:")[1]
    path = tmp_path / "two.yaml"
    path.write_text(
        f"{books}  calmer:{body}budgets:{rest.replace('[calm, hold]', '[calm, calmer, hold]')}"
    )
    found, text, _ = told(*SPIKE[:40], *[8.0] * 100, policy=path)

    assert [b["runbook"] for b in found["runbooks"]] == ["calm", "calmer"]
    for book in found["runbooks"]:  # the first one is taken back before the second, which is too
        assert [a["id"].partition("/")[2][2:] for a in book["actions"]] == [
            "0-snapshot",
            "1-lr_scale",
            "undo-lr_scale",
        ]
        assert [v["what"] for v in book["verification"]] == ["started", "failed"]
    assert "undo: lr_scale value" in text
    assert found["end"]["how"] == "automatic actions are off; a person is needed"
    assert "calm did not help: spike is in breach" in text


def test_the_records_of_two_incidents_are_not_mixed(keep_run, make_frames):
    """A rule that fires in the very event that opens an incident belongs to it, and only to it."""
    run = keep_run(make_frames(0, *SPIKE, *[2.0] * 60, 8.0, *[2.0] * 60))
    records = list(audit.read(run.audit_path))
    first, second = (
        {r["seq"] for r in incident_report.records_of(records, i)} for i in ("inc-1", "inc-2")
    )

    assert not first & second
    fired = {
        r["seq"]
        for r in records
        if r["kind"] == "rule" and r["rule"] == "spike" and r["data"]["what"] == "fired"
    }
    assert len(fired & first) == len(fired & second) == 1


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (
            {
                "metric": "m",
                "value": 4.0,
                "z": 8.25,
                "threshold": 6.0,
                "median": 2.0,
                "scale": 0.25,
                "steps": [1, 9],
                "samples": 9,
                "transform": "none",
            },
            "m 4, z 8.25 (limit 6); baseline 2 +- 0.25 over steps 1..9 (9 samples)",
        ),
        (
            {"metric": "m", "value": 4.0, "ratio": 0.85, "threshold": 0.8, "clear": 0.9},
            "m 4, 0.85 times its baseline (limit 0.8, clear 0.9)",
        ),
        ({"values": {"a": "NaN", "b": 1.0}, "nonfinite": ["a"]}, "a NaN, b 1"),
        ({"signal": "step", "value": 130.0, "threshold": 120.0}, "no step for 130 s (limit 120 s)"),
        (
            {"last_breach": {"g": 4}, "within": 5, "match": {}},
            "within 5 steps; breaches so far: g at step 4",
        ),
        (
            {"last_breach": {}, "within": 5, "match": {"steps": {"g": 4, "z": 5}}},
            "last match within 5 steps: g at step 4, z at step 5",
        ),
        ({"metric": "m", "value": 1.0, "threshold": 2.0, "parts": 7}, "m 1 (limit 2), parts 7"),
        (
            {"metric": "m", "value": 0.3, "bound": 0.2, "threshold": 0.15, "last_block": 2.5},
            "m 2.5, at least 0.2 per 1000 steps (limit 0.15)",
        ),
    ],
)
def test_readings_in_words(numbers, text):
    """Whatever the kind: what was measured, the limit, the baseline; unknown keys as they are."""
    assert format_readings.reading(numbers) == text


def test_an_action_that_failed_is_not_counted_as_done(told, keep_run, make_frames):
    """The list, the end and the receipt say what was done, and what was tried in vain."""
    found, text, records = told(*SPIKE, answer=lambda action: {"error": "the rank is gone"})
    lines = "\n".join(render.table(incident_report.table(records)))
    run = keep_run(make_frames(0, *SPIKE), answer=lambda action: {"error": "no"}, name="other")

    assert found["end"]["acted"] is False
    assert "the job was changed" not in text
    assert "no action on the job, 2 failed" in lines  # it, and what should take it back
    assert receipt.outcome(records)["actions"] == 0
    assert receipt.outcome(records)["failed"] == 2
    assert "1 incident, no action on the job, 2 failed" in receipt.closing(run)[0]
