"""Checkpoints that are found and verified: what is good, what is not, and who is told."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest

from supervise.checkpoints.save_report import RunPosition
from supervise.checkpoints.verifier_process import Verifier
from supervise.core.model.events import Notice

pytestmark = pytest.mark.slow  # it waits for files to be still


def test_one_that_the_probe_tells_of(desk):
    """Verified, pinned, registered, in one frame, with a manifest."""
    (desk.out / "train.py").write_text("import torch")
    path = desk.write("a.pt", "good 1", step=99)

    assert desk.turn() == [("ckpt-1", 99, True)]
    assert desk.told[0].data["seconds"] == 0.5 and desk.told[0].data["path"] == str(path)
    assert desk.guard.newest() == {"checkpoint_ok": 1.0, "checkpoint_size": 6.0}
    assert desk.guard.newest() == {}
    entry = desk.entry("ckpt-1")
    assert (entry["state"], entry["pinned"], entry["bytes"]) == ("verified", True, 6)
    assert (desk.run / "checkpoints/ckpt-1/data/a.pt").read_text() == "good 1"
    made = json.loads((desk.run / "checkpoints/ckpt-1/manifest.json").read_text())
    assert made["argv"] == ["python", "train.py"] and made["metrics"] == {"train_loss_raw": 2.5}
    assert made["environment"]["lock"] and made["inputs"]["../tokenizer.json"].startswith("sha256:")
    assert made["code"]["files"]["train.py"].startswith("sha256:")  # no repository is about
    assert made["rng"] == "its random states are in the checkpoint"


def test_what_a_manifest_lacks_is_told_once(desk):
    """The policy names a file that is not there: its hash is missing beside each checkpoint."""
    desk.tokenizer.unlink()
    desk.write("a.pt", "good 1", step=9)
    desk.turn()
    (said,) = [e.message for e in desk.told if e.kind == "note"]
    assert "job.manifest: ../tokenizer.json cannot be read" in said and str(desk.out) in said
    made = json.loads((desk.run / "checkpoints/ckpt-1/manifest.json").read_text())
    assert made["inputs"] == {"../tokenizer.json": None}
    assert made["code"]["files"]["train.py"] is None

    desk.write("b.pt", "good 2", step=19)
    desk.turn()
    assert len([e for e in desk.told if e.kind == "note"]) == 1


@pytest.mark.parametrize("word", ["good", "bad"])
def test_the_register_comes_before_the_news(desk, word):
    """Nobody chooses what a supervisor after us would not know; a full disk is told first."""
    desk.write("a.pt", f"{word} 1", step=9)
    desk.guard.look()
    (desk.run / "checkpoints.json").unlink()
    (desk.run / "checkpoints.json").mkdir()

    assert desk.guard.work()

    assert [e.kind for e in desk.guard.poll()] == ["note", "checkpoint"]


def test_half_written_is_waited_for(desk):
    """Each growth begins the waiting anew; nothing is verified before it is still."""
    desk.write("a.pt", "go", step=9)
    desk.guard.look()
    desk.write("a.pt", "good but not yet")
    desk.guard.look()
    assert not desk.guard.work() and desk.entries()[0]["state"] == "found"

    assert desk.turn() == [("ckpt-1", 9, True)]


def test_a_name_that_comes_later(desk):
    """Written as `.partial`, told of, renamed: before the guard looks or after."""
    early = desk.write("a.partial", "good a", step=9)
    early.rename(desk.out / "a.pt")
    late = desk.write("b.partial", "good b", step=19)
    desk.guard.look()
    desk.guard.look()
    late.rename(desk.out / "b.pt")

    assert sorted(desk.turn()) == [("ckpt-1", 9, True), ("ckpt-2", 19, True)]
    assert [Path(e["path"]).name for e in desk.entries()] == ["a.pt", "b.pt"]


def test_a_last_name_that_comes_as_the_job_ends(desk):
    """Nobody verifies it any more, but it lies there."""
    late = desk.write("a.partial", "good a", step=9)
    desk.guard.look()
    late.rename(desk.out / "a.pt")
    desk.guard.close()

    (entry,) = desk.entries()
    assert (Path(entry["path"]).name, entry["state"], entry["there"]) == ("a.pt", "found", True)


def test_a_pattern_finds_what_nobody_tells_of(desk):
    """Not what was there before the run. Its step is a count inside it that is near, else now."""
    desk.guard.close()
    shutil.rmtree(desk.run)
    desk.run.mkdir()
    desk.write("old.pt", "good old")
    desk.moment = RunPosition(step=7)
    desk.open(glob=("*.pt",))
    desk.guard.poll()
    desk.write("new.pt", "bad: a file nobody told of is verified by our own interpreter")

    assert desk.turn() == [("ckpt-1", 7, False)]
    assert "cannot be loaded" in desk.entry("ckpt-1")["problems"][0]


def test_a_name_that_is_used_twice_between_two_looks(desk):
    """Each save writes the same `.partial`; an inode that is free again may be the next one's."""
    for number in (1, 2):
        desk.write("fresh.partial", f"good {number}", step=10 * number).rename(
            desk.out / f"{number}.pt"
        )
    assert sorted(desk.turn()) == [("ckpt-1", 10, True), ("ckpt-2", 20, True)]
    for path in desk.out.iterdir():
        path.unlink()
    desk.write("fresh.partial", "good 3", step=30).rename(desk.out / "3.pt")

    assert desk.turn() == [("ckpt-3", 30, True)]
    assert [Path(e["path"]).name for e in desk.entries()] == ["1.pt", "2.pt", "3.pt"]


@pytest.mark.parametrize(
    ("text", "state", "problem"),
    [
        ("bad", "bad", "it is damaged"),
        ("code", "unverified", "it needs code"),
        ("crash", "bad", "reading it crashes a process: Segmentation fault"),
        ("memory", "unverified", "the verifier was killed (Killed), perhaps for memory"),
        ("hang", "unverified", "the verifier took longer than 0 s"),
    ],
)
def test_what_is_not_good(desk, text, state, problem):
    """Never pinned, never told of as good; what could not be looked at is tried twice."""
    desk.open(limit_s=0.4 if text == "hang" else 60.0)
    desk.write("a.pt", text, step=9)

    told = desk.turn() + desk.turn()

    assert told == ([("ckpt-1", 9, False)] if state == "bad" else [])
    assert desk.entry("ckpt-1")["problems"] == [problem] and desk.pinned() == []
    assert desk.entry("ckpt-1")["state"] == state
    assert problem in desk.told[0].message
    assert desk.guard.newest().get("checkpoint_ok") == (0.0 if state == "bad" else None)


def test_files_of_several_ranks_are_no_checkpoint(desk):
    """Unless their directory is named."""
    desk.write("rank0.pt", "good 0", step=9)
    desk.turn()
    path = desk.write("rank1.pt", "good 1")
    desk.guard.saved(Notice(0, "checkpoint-saved", "", 1, 10, {"path": str(path)}))

    assert desk.turn() == [("ckpt-1", 9, False)]
    assert {e["state"] for e in desk.entries()} == {"unverified"}
    desk.turn()
    assert desk.pinned() == []


def test_a_supervisor_that_takes_over_knows_all(desk):
    """Numbers go on; what was verified is not verified again; what came meanwhile is."""
    desk.write("a.pt", "good 1", step=9)
    desk.turn()
    desk.guard.close()
    path = desk.write("b.pt", "bad 2")
    desk.open(glob=("*.pt",))
    desk.tell(path, 19)

    assert desk.turn() == [("ckpt-2", 19, False)]


def test_the_end_waits_for_nobody(desk):
    """A verification under way is given up, and what it looked at stays as it was found."""
    desk.write("a.pt", "hang", step=9)
    desk.guard.start()
    while not desk.python.with_name("hanging").exists():
        time.sleep(0.01)

    desk.guard.close()

    assert desk.entry("ckpt-1")["state"] == "found"
    assert not [t for t in threading.enumerate() if t.name in ("checkpoints", "verify")]


def test_a_guard_goes_on_for_one_whose_supervisor_died(desk):
    """What was verified, and nobody has heard of, is told; what was heard is not told again."""
    desk.write("a.pt", "good 1", step=5)
    desk.write("b.pt", "bad 1", step=6)
    heard = {name: ok for name, _, ok in desk.turn()}
    assert sorted(heard.values()) == [False, True]

    for known, told in ((heard, {}), ({"ckpt-1": False, "ckpt-2": True}, heard), ({}, heard)):
        desk.open()
        desk.guard.resume(known)
        assert {e.data["id"]: e.data["ok"] for e in desk.guard.poll()} == told


def test_a_verifier_is_known_as_ours_and_not_as_the_jobs(tmp_path):
    """By its process group: what ends the job, or counts its memory, must leave it alone."""
    (tmp_path / "a.pt").write_text("good")
    python = tmp_path / "python"
    group = "print(json.dumps({'environment': {'group': os.getpgrp()}}))"
    python.write_text(f"#!{sys.executable}\nimport json, os\n{group}\n")
    python.chmod(0o755)

    answer = Verifier(("load",)).verify(str(tmp_path / "a.pt"), 4, str(python))

    assert answer.environment == {"group": os.getpgrp()}
