"""`journal: {max_gb: ...}`: what is left of a run whose journal was over its limit."""

from __future__ import annotations

import pytest

from supervise.store import read_audit


@pytest.fixture
def limited(recorded):
    """The run of the NaN at step 100 under a limit of 4 kB; without one its journal has 8 kB."""
    return recorded(max_bytes=4000)


def test_the_journal_keeps_its_limit_and_the_log_says_what_went(supervise, limited):
    data = [record.get("data", {}) for record in read_audit(limited.audit_path)]
    notes = [each for each in data if each.get("what") == "journal-thinned"]
    assert notes and not notes[0]["cited"]
    assert sum(path.stat().st_size for path in limited.journal_path.iterdir()) <= 4500

    code, out, _ = supervise("replay", limited.path)
    first = min(note["events"][0] for note in notes)
    assert (code, out.splitlines()[0].split()[5]) == (2, f"{first}")
    code, out, err = supervise("export", "--csv", limited.path)
    assert code == 0 and "frames were removed (journal.max_gb)" in err
    assert 20 < len(out.splitlines()) < 121 and out.splitlines()[-1].startswith("119,0,0,")

    code, out, _ = supervise("audit", "verify", limited.path)
    assert code == 0 and "segments are unchanged; frames of " in out
    assert supervise("why", limited.path)[0] == 0
    code, _, err = supervise("why-not", limited.path, "--rule", "nonfinite.loss", "--step", 9)
    assert code != 0 and "lacks the frames of events" in err


def test_a_change_of_what_is_left_is_found(supervise, limited):
    (*_, path) = sorted(limited.journal_path.iterdir())
    path.write_bytes(path.read_bytes()[:-1])

    code, out, _ = supervise("audit", "verify", limited.path)
    assert code == 1 and "journal: changed: journal/" in out
