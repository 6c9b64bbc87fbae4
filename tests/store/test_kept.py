"""`audit verify` compares the files beside the audit log with their digests in it."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest

from supervise.cli import invoke
from supervise.core.model import Frame
from supervise.store import Audit, Journal, Recorder

from .conftest import WALL


def digest(path):
    return sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def sealed(run, policy):
    """A run that has ended: a policy, a bundle, a journal of three segments, all in its log.

    Another supervisor took it over: the digest of the journal goes on from the older segments.
    """
    run.policy_path.write_bytes(policy.resolved.encode())
    bundle = run.incidents_path / "inc-1" / "snapshot-1"
    bundle.mkdir(parents=True)
    (bundle / "metrics.csv").write_text("step\n")
    listed = {"name": "metrics.csv", "sha256": digest(bundle / "metrics.csv")}
    (bundle / "manifest.json").write_text(json.dumps({"files": [listed]}))
    audit = Audit.open(run.audit_path, run.id, at_ns=1, wall=WALL)
    kept = Journal.open(run.journal_path, segment_bytes=100)
    recorder = Recorder(kept, audit, lambda: (1, WALL), print)
    recorder.note("run_start", -1, "", {"policy_digest": f"sha256:{digest(run.policy_path)}"})
    for step in range(9):
        recorder.record_event(Frame(step, 0, 0, step, (1.0, 2.0)))
        if step == 4:
            recorder.close()
            audit = Audit.open(run.audit_path, run.id, at_ns=1, wall=WALL)
            kept = Journal.open(run.journal_path, segment_bytes=100)
            recorder = Recorder(kept, audit, lambda: (1, WALL), print)
            recorder.note("recovered", step, "", {"journal": recorder.journal})
    made = {"path": "incidents/inc-1/snapshot-1", "sha256": digest(bundle / "manifest.json")}
    recorder.note("commit", 8, "", {"result": made})
    recorder.note("run_end", 8, "", {"exit_code": 0, "journal": recorder.journal})
    recorder.close()
    return run


def verified(run, capsys):
    capsys.readouterr()
    code = invoke(["audit", "verify", "--json", str(run.path)])
    told = json.loads(capsys.readouterr().out)
    return code, {part["part"]: (part["status"], part["text"]) for part in told["parts"]}


def test_unchanged_run_is_good(sealed, capsys):
    code, parts = verified(sealed, capsys)

    assert code == 0
    assert {part: status for part, (status, _) in parts.items()} == dict.fromkeys(
        ("policy", "evidence", "journal"), "good"
    )
    assert invoke(["audit", "verify", str(sealed.path)]) == 0
    assert "not checked: records removed from the end" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "file", "said"),
    [
        ("policy", "policy.yaml", "policy.yaml was changed: expected sha256:"),
        ("evidence", "incidents/inc-1/snapshot-1/metrics.csv", "metrics.csv was changed: expected"),
        ("evidence", "incidents/inc-1/snapshot-1/manifest.json", "manifest.json was changed"),
        ("journal", "journal/00000.jrn", "the journal up to event 5 (byte"),
        ("journal", "journal/00002.jrn", "the journal up to event 9 (byte"),
    ],
)
def test_changed_or_missing_file_is_reported(sealed, capsys, part, file, said):
    path = sealed.path / file
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    code, parts = verified(sealed, capsys)
    assert (code, parts[part][0]) == (1, "changed")
    assert said in parts[part][1]

    path.unlink()
    code, parts = verified(sealed, capsys)
    assert code == 1 and parts[part][0] in ("changed", "missing")


def test_events_added_after_the_end_are_reported(sealed, capsys):
    """A forged event behind the last one has a good checksum, and no digest."""
    forger = Journal.open(sealed.journal_path)
    forger.append(Frame(9, 0, 0, 9, (1.0, 2.0)))
    forger.close()

    code, parts = verified(sealed, capsys)

    assert (code, parts["journal"][0]) == (1, "changed")
    assert "were added after the last one" in parts["journal"][1]


def test_partial_event_on_a_full_disk_is_no_change(sealed, capsys):
    with max(sealed.journal_path.iterdir()).open("ab") as file:
        file.write(b"\x40\0\0\0half")

    assert verified(sealed, capsys)[0] == 0


def test_running_job_is_checked_up_to_the_last_digest(run, capsys):
    """The newest digest of the journal is that of a take-over, or there is none yet."""
    audit = Audit.open(run.audit_path, run.id, at_ns=1, wall=WALL)
    recorder = Recorder(Journal.open(run.journal_path), audit, lambda: (1, WALL), print)
    recorder.record_event(Frame(1, 0, 0, 1, (1.0,)))
    assert verified(run, capsys)[1]["journal"][0] == "unchecked"
    recorder.note("recovered", 1, "", {"journal": recorder.journal})
    recorder.record_event(Frame(2, 0, 0, 2, (1.0,)))

    assert "its first 1 events match record 0" in verified(run, capsys)[1]["journal"][1]
    recorder.close()
