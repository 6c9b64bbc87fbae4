"""supervise release: a word that reaches the supervisor, or says why it cannot."""

from __future__ import annotations

import json

from supervise.cli import invoke as run
from supervise.inputs.words import Words, post


def test_a_word_arrives_once_with_its_speaker(tmp_path):
    """Taken in order, removed once taken; what is no word is dropped."""
    post(tmp_path, "release", "anna", {}, at_ns=2)
    post(tmp_path, "ack", "bo", {"incident": "inc-1"}, at_ns=1)
    (tmp_path / "control" / "9-9.json").write_text("no JSON")
    words = Words(tmp_path, lambda: 7)

    told = words.poll()
    assert [(t.word, t.operator, t.args) for t in told] == [
        ("ack", "bo", {"incident": "inc-1"}),
        ("release", "anna", {}),
    ]
    assert words.poll() == []


def test_a_run_without_a_supervisor_cannot_be_released(tmp_path, capsys):
    """The word would be read by nobody: said, with exit 64."""
    (tmp_path / "run.json").write_text(json.dumps({"run": "r1"}))
    (tmp_path / "audit.log").write_text("")

    assert run(["release", str(tmp_path)]) == 64
    assert "has no supervisor any more" in capsys.readouterr().err
    assert not (tmp_path / "control").exists()
