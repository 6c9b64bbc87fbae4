import json
import re

import pytest

from supervise.store import read_audit, read_journal


def test_another_policy_is_a_difference_that_is_shown(supervise, recorded):
    run = recorded()
    text = run.policy_path.read_text()
    same = json.loads(supervise("replay", "--json", run.path)[1])
    run.policy_path.write_text(f"{text}\n# edited\n")
    edited = supervise("replay", "--json", run.path)
    run.policy_path.write_text(text.replace("SEV0", "SEV1"))

    code, out, _ = supervise("replay", run.path)

    assert code == 1
    changed, first, recorded_, replayed = out.splitlines()
    digests = "expected sha256:.{64}, actual sha256:.{64}"
    assert re.fullmatch(f"edited policy: policy.yaml was changed: {digests}", changed)
    assert first.startswith("NONDETERMINISM at record ")
    assert '"severity": "SEV0"' in recorded_
    assert '"severity": "SEV1"' in replayed
    assert (same["status"], same["difference"]) == ("same", None) and same["decisions"] > 0
    assert (edited[0], json.loads(edited[1])["status"]) == (1, "edited")


def test_a_journal_that_lost_its_end_is_called_incomplete(supervise, recorded):
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
