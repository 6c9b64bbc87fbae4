import json
import re

import pytest

from supervise.store import read_audit, read_journal


def test_another_policy_is_a_difference_that_is_shown(supervise, recorded):
    """Exit code 1, the number of the first record that differs, and both decisions."""
    run = recorded()
    run.policy_path.write_text(run.policy_path.read_text().replace("SEV0", "SEV1"))

    code, out, _ = supervise("replay", run.path)

    assert code == 1
    edited, first, recorded_, replayed = out.splitlines()
    assert re.fullmatch(
        "edited policy: policy.yaml was changed: expected sha256:.{64}, actual sha256:.{64}", edited
    )
    assert first.startswith("NONDETERMINISM at record ")
    assert '"severity": "SEV0"' in recorded_
    assert '"severity": "SEV1"' in replayed


def test_a_journal_that_lost_its_end_is_called_incomplete(supervise, recorded):
    """Exit code 2, from which event on, and what was compared up to there: not NONDETERMINISM."""
    run = recorded()
    (segment,) = run.journal_path.iterdir()
    segment.write_bytes(segment.read_bytes()[:-20])
    events = len(list(read_journal(run.journal_path)))
    known = [
        r for r in read_audit(run.audit_path) if r["actor"] == "engine" and r["event"] < events
    ]

    code, out, _ = supervise("replay", run.path)

    assert code == 2
    assert out.splitlines()[0] == (
        f"incomplete: the journal ends before event {events}; "
        f"{len(known)} decisions follow from what is there"
    )
    assert "NONDETERMINISM" not in out


@pytest.mark.parametrize("what", ["journal", "audit.log", "policy.yaml"])
def test_what_is_missing_is_named(supervise, recorded, what):
    run = recorded()
    gone = run.path / what
    gone.rename(run.path / "elsewhere")

    code, out, err = supervise("replay", run.path)

    assert code in (64, 65)
    assert out == ""
    assert what in err


def test_the_result_is_one_document_too(supervise, recorded):
    run = recorded()
    code, out, _ = supervise("replay", "--json", run.path)
    found = json.loads(out)
    assert (code, found["status"], found["difference"]) == (0, "same", None)
    assert found["decisions"] > 0
    (run.path / "policy.yaml").write_text((run.path / "policy.yaml").read_text() + "\n# edited\n")
    code, out, _ = supervise("replay", "--json", run.path)
    assert (code, json.loads(out)["status"]) == (1, "edited")
