"""supervise why: the story of a decision, also of a run in progress and of one that was killed."""

from __future__ import annotations

import json

import pytest

SPIKE = (*[2.0] * 40, 8.0, 7.0, *[2.0] * 40)


def test_a_run_without_an_incident_says_what_was_watched(supervise, keep_run, make_frames):
    run = keep_run(make_frames(0, *[2.0] * 30))
    run.write_json("state.json", {"rules": {"spike": "OK", "odd": "UNKNOWN", "blind": "inactive"}})

    code, out, _ = supervise("why", run.path)

    assert code == 0
    assert "no incident; the run ended at step 29" in out
    assert "evaluated: 2 of 3 rules" in out
    assert "inactive: blind" in out
    assert "supervise why-not" in out


def test_a_run_in_progress_can_be_asked(supervise, keep_run, make_frames, alive):
    run = keep_run(make_frames(0, *SPIKE[:42]), ended=False, answer=lambda action: None)
    alive(run)
    code, out, _ = supervise("why", run.path)

    assert code == 0
    assert "State  an action is under way" in out
    assert "the run is in progress, at step 40 or later" in out and "lr scale under way" in out


def test_a_killed_supervisor_is_said_to_be_gone(supervise, keep_run, make_frames):
    """Also where the log ends in half a record and the policy cannot be read."""
    run = keep_run(make_frames(0, *SPIKE[:42]), ended=False)
    with run.audit_path.open("ab") as log:
        log.write(b"half a rec")
    run.policy_path.write_text("broken: [")

    code, out, _ = supervise("why", "--full", run.path)

    assert code == 0
    assert "the run has no supervisor" in out
    assert "when high" in out


def test_where_the_record_could_not_be_written_nothing_was_done(supervise, keep_run, make_frames):
    run = keep_run(make_frames(0, *[2.0] * 20, grad=10.0), fails_at=8)

    assert "Did    nothing: the record of the run could not" in supervise("why", run.path)[1]


@pytest.mark.parametrize("kept", [0, 600])
def test_a_record_that_was_cut_is_no_quiet_run(supervise, keep_run, make_frames, kept):
    run = keep_run(make_frames(0, *SPIKE))
    run.audit_path.write_bytes(run.audit_path.read_bytes()[:kept])

    code, out, _ = supervise("why", run.path)

    head = out.splitlines()[0]
    remaining = "no incident in the remaining records; the audit log is truncated"
    assert (code, head.startswith(f"run {run.id}: {remaining}")) == (0, True)
    assert ("the log is empty" if kept == 0 else "is truncated, ") in head and "step -1" not in out


def test_it_is_ten_lines_and_the_same_document_everywhere(supervise, keep_run, make_frames):
    run = keep_run(make_frames(0, *SPIKE, *[2.0] * 30, 8.0, *[2.0] * 60))

    card = supervise("why", run.path, "inc-1")[1].splitlines()
    code, out, _ = supervise("why", "--json", "--write", run.path / "written", run.path, "inc-1")
    written = run.path / "written"
    document = json.loads((written / "incident.json").read_text())

    assert code == 0 and json.loads(out) == document
    heads = ["inc-1", "What", "Cause", "Did", "Cost", "Proof", "Loss", "Next"]
    assert [line.split()[0] for line in card] == heads
    assert document["did"]["text"] in card[3]
    assert document["title"] in (written / "incident.html").read_text()
    assert document["cause"]["text"] in (written / "summary.md").read_text()
    rows = supervise("why", run.path)[1].splitlines()
    assert [row.split()[0] for row in rows[1:3]] == ["inc-1", "inc-2"] and rows[4][:5] == "inc-2"


def test_what_a_job_said_cannot_steer_the_terminal(supervise, keep_run, make_frames):
    run = keep_run(make_frames(0, *SPIKE), answer=lambda action: {"error": "\033[2Jboo"})

    out = supervise("why", run.path)[1]

    assert "boo" in out and "\033" not in out
