"""The guard over real files. The interpreter that verifies is a fake, so that no test needs torch:
a file's first word is its verdict."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest

import supervise_offline
from supervise.core.values import Noticed
from supervise.errors import StoreError
from supervise.inputs.checkpoints import Guard, Moment
from supervise.inputs.checkpoints.verifier import Verifier
from supervise.store import checkpoints as register

pytestmark = pytest.mark.slow  # it waits for files to be still, and once for torch

VERIFIER = f"""#!{sys.executable}
import json, os, signal, sys, time
sys.path.append({str(Path(supervise_offline.__file__).parents[1])!r})
from supervise_offline.checkpoint import verify

request = json.load(sys.stdin)
print(json.dumps({{"environment": {{"torch": "2.0", "lock": "sha256:0"}}}}), flush=True)
for path in request["paths"]:
    names = verify.listing(path)
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    word = open(os.path.join(folder, names[0])).read().split()[0]
    if word == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "memory":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "hang":
        open(path + ".begun", "w").close()
        time.sleep(60)
    files = {{name: verify.digest(os.path.join(folder, name)) for name in names}}
    ok = {{"good": True, "code": None}}.get(word, False)
    bad, unread = ["it is damaged"] * (ok is False), ["it needs code"] * (ok is None)
    print(json.dumps({{"path": path, "ok": ok, "problems": bad, "unread": unread, "files": files,
                      "step": 5, "rng": True}}), flush=True)
"""
FORM = {
    "glob": (),
    "verify": ("load", "finite"),
    "keep_good": 2,
    "pin": "copy",
    "settle": 0.0,
    "restore_test": None,
}


class Desk:
    """A guard that is driven by hand, and the job beside it."""

    def __init__(self, folder):
        self.out, self.run = folder / "out", folder / "run"
        self.out.mkdir()
        self.run.mkdir()
        self.python = folder / "python"
        self.python.write_text(VERIFIER)
        self.python.chmod(0o755)
        self.moment = Moment(values={"train_loss_raw": 2.5})
        self.told = []
        self.open()

    def open(self, limit_s=60.0, share=1.0, **form):
        self.guard = Guard(
            {**FORM, **form}, self.run, self.out, lambda: self.moment,
            facts={"argv": ["python", "train.py"]}, data=["tokenizer.json"], every_s=0.0,
            limit_s=limit_s, share=share,
        )  # fmt: skip

    def write(self, name, text, step=None):
        """Write a file; with a step, the probe tells of it."""
        path = self.out / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        if step is not None:
            self.tell(path, step)
        return path

    def tell(self, path, step, **about):
        found = path.stat()
        data = {
            "path": str(path),
            "inode": [found.st_dev, found.st_ino],
            "python": str(self.python),
        }
        notice = Noticed(0, "checkpoint-saved", "", 0, step + 1, {**data, "seconds": 0.5, **about})
        self.guard.saved(notice)

    def turn(self):
        """Look twice, do all work, and return what was told: (id, step, ok)."""
        self.guard.look()
        self.guard.look(closely=True)
        while self.guard.work():
            pass
        news = self.guard.poll()
        self.told += news
        return [(e.data["id"], e.data["step"], e.data["ok"]) for e in news if e.data]

    def hurry(self, **within):
        """Hurry, and wait until the guard says that it is done."""
        self.guard.hurry(**within)
        while self.guard.hurrying:
            time.sleep(0.01)

    def entry(self, name):
        return next(e for e in self.entries() if e["id"] == name)

    def entries(self):
        return register.read(self.run)["checkpoints"]

    def pinned(self):
        return [e["id"] for e in self.entries() if e["pinned"]]


@pytest.fixture
def desk(tmp_path):
    """See `Desk`."""
    desk = Desk(tmp_path)
    yield desk
    desk.guard.close()


# ── found and verified ────────────────────────────────────────────────────────────────────────────


def test_one_that_the_probe_tells_of(desk):
    """Verified, pinned, registered, in one frame, with a manifest."""
    (desk.out / "tokenizer.json").write_text("{}")
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
    assert made["environment"]["lock"] and made["inputs"]["tokenizer.json"].startswith("sha256:")
    assert made["rng"] == "its random states are in the checkpoint"


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


def test_a_pattern_finds_what_nobody_tells_of(desk):
    """Not what was there before the run. Its step is a count inside it that is near, else now."""
    desk.guard.close()
    shutil.rmtree(desk.run)
    desk.run.mkdir()
    desk.write("old.pt", "good old")
    desk.moment = Moment(step=7)
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
    desk.guard.saved(Noticed(0, "checkpoint-saved", "", 1, 10, {"path": str(path)}))

    assert desk.turn() == [("ckpt-1", 9, False)]
    assert {e["state"] for e in desk.entries()} == {"unverified"}
    desk.turn()
    assert desk.pinned() == []


def test_after_a_crash_the_guard_hurries(desk):
    """Newest first, without a rest, and what nobody told of need not settle any more."""
    desk.open(glob=("*.pt",), settle=600.0, share=0.001)
    desk.guard.start()
    desk.write("a.pt", "good 1", step=9)
    while not desk.guard.poll():
        time.sleep(0.01)  # from here on the guard rests
    for number in (2, 3):
        desk.write(f"{number}.pt", f"good {number}", step=number * 10)
    desk.write("4.pt", "torn")

    desk.hurry()

    news = [(e.data["id"], e.data["ok"]) for e in desk.guard.poll()]
    assert news == [("ckpt-4", False), ("ckpt-3", True), ("ckpt-2", True)]
    assert desk.pinned() == ["ckpt-1", "ckpt-2", "ckpt-3"]


def test_a_hurry_is_bounded(desk):
    """What takes too long is left as it was found."""
    desk.write("a.pt", "hang", step=9)

    desk.hurry(within_s=1.0)

    assert desk.guard.poll() == [] and desk.entry("ckpt-1")["state"] == "found"


# ── kept ──────────────────────────────────────────────────────────────────────────────────────────


def test_rotation_by_the_job(desk):
    """What the job deletes stays pinned, and stays good."""
    desk.write("a.pt", "good 1", step=9)
    desk.turn()
    (desk.out / "a.pt").unlink()

    assert desk.turn() == []
    entry = desk.entry("ckpt-1")
    assert (entry["state"], entry["pinned"], entry["there"]) == ("verified", True, False)


def test_only_the_newest_good_ones_stay(desk):
    """A suspect one never replaces a good one; what is dropped is told if it is gone for good."""
    for number in range(1, 5):
        desk.write("a.pt", f"good {number}", step=number * 10)
        desk.turn()
        if number == 3:
            desk.moment = Moment(suspects=frozenset({"ckpt-3"}))
        desk.turn()
        desk.turn()

    assert desk.pinned() == ["ckpt-2", "ckpt-4"]
    gone = [e.data["id"] for e in desk.told if e.data.get("ok") is False]
    assert gone == ["ckpt-3", "ckpt-1"]
    assert sorted(p.name for p in (desk.run / "checkpoints").iterdir()) == ["ckpt-2", "ckpt-4"]


def test_what_is_on_trial_neither_goes_nor_stands_for_a_good_one(desk):
    """Until it is known what it is."""
    for number in range(1, 6):
        desk.write("a.pt", f"good {number}", step=number * 10)
        desk.turn()
        if number == 2:
            desk.moment = Moment(on_trial=frozenset({"ckpt-3", "ckpt-4", "ckpt-5"}))
        desk.turn()
        desk.turn()
    assert desk.pinned() == [f"ckpt-{number}" for number in range(1, 6)]
    desk.moment = Moment(suspects=frozenset({"ckpt-3", "ckpt-4"}))
    desk.turn()
    desk.turn()

    assert desk.pinned() == ["ckpt-2", "ckpt-5"]


def test_written_again_in_place(desk):
    """The new bytes are another checkpoint; the copy of the old one is still what was verified."""
    path = desk.write("a.pt", "good 1", step=9)
    desk.turn()
    path.write_text("torn")
    desk.tell(path, 19)

    assert desk.turn() == [("ckpt-2", 19, False)]
    assert desk.guard.put_back("ckpt-1")["path"] == str(path)
    assert path.read_text() == "good 1"


def test_links_are_lost_when_the_file_is_written_again(desk):
    """They cost nothing; a rename saves them, a write into the file does not."""
    desk.open(pin="link")
    first, second = desk.write("a.pt", "good 1", step=9), desk.write("b.pt", "good 2", step=19)
    desk.turn()
    copy = desk.run / "checkpoints/ckpt-1/data/a.pt"
    assert copy.stat().st_ino == first.stat().st_ino
    first.unlink()
    second.write_text("torn")

    assert desk.turn() == [("ckpt-2", 19, False)]
    assert desk.pinned() == ["ckpt-1"] and copy.read_text() == "good 1"
    assert desk.entry("ckpt-2")["state"] == "vanished"


def test_a_pinned_copy_is_tested_again(desk):
    """One that has rotted is bad from then on."""
    desk.write("a.pt", "good 1", step=9)
    desk.turn()
    desk.guard.close()
    desk.open(restore_test=1e-9)
    copy = desk.run / "checkpoints/ckpt-1/data/a.pt"
    copy.write_text("good 2")

    assert desk.guard.work()

    (event,) = desk.guard.poll()
    assert event.data["ok"] is False and "not those that were verified" in event.message
    assert desk.entry("ckpt-1")["state"] == "bad"


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
    path = desk.write("a.pt", "hang", step=9)
    desk.guard.start()
    while not path.with_name("a.pt.begun").exists():
        time.sleep(0.01)

    desk.guard.close()

    assert desk.entry("ckpt-1")["state"] == "found"
    assert not [t for t in threading.enumerate() if t.name in ("checkpoints", "verify")]


# ── put back ──────────────────────────────────────────────────────────────────────────────────────


def test_put_back(desk):
    """The old one is in its place, newer and bad ones are out of the way; twice is once."""
    old = desk.write("ckpt_1.pt", "good 1", step=9)
    desk.turn()
    new, bad = desk.write("ckpt_2.pt", "good 2", step=19), desk.write("ckpt_0.pt", "bad", step=8)
    desk.turn()
    last = desk.write("ckpt_3.pt", "not looked at yet", step=29)
    old.unlink()

    done = desk.guard.put_back("ckpt-1")

    assert done["path"] == str(old) and old.read_text() == "good 1"
    assert sorted(p.name for p in desk.out.iterdir()) == ["ckpt_1.pt"]
    aside = desk.run / "checkpoints/aside"
    assert sorted(done["moved"]) == [
        str(aside / name) for name in ("ckpt-2-ckpt_2.pt", "ckpt-3-ckpt_0.pt", "ckpt-4-ckpt_3.pt")
    ]
    assert not new.exists() and not bad.exists() and not last.exists()
    assert desk.guard.put_back("ckpt-1") == {"path": str(old), "moved": []}
    assert desk.turn() == [] and desk.pinned() == ["ckpt-1", "ckpt-2"]


def test_put_back_a_directory(desk):
    """The one that lies there is moved as a whole."""
    folder = desk.out / "checkpoint-10"
    desk.write("checkpoint-10/model.bin", "good 1")
    desk.write("checkpoint-10/z.txt", "more")
    desk.tell(folder, 9)
    assert desk.turn() == [("ckpt-1", 9, True)]
    (folder / "model.bin").write_text("torn")

    done = desk.guard.put_back("ckpt-1")

    assert (folder / "model.bin").read_text() == "good 1" and (folder / "z.txt").exists()
    (moved,) = done["moved"]
    assert (Path(moved) / "model.bin").read_text() == "torn"
    assert desk.guard.put_back("ckpt-1")["moved"] == []


def test_what_was_prepared_is_put_back_at_once(desk):
    """Nothing is read twice: neither what lay unhurt in its place nor the copy."""
    path = desk.write("a.pt", "good 1", step=9)
    desk.turn()
    pinned = desk.run / "checkpoints/ckpt-1/data/a.pt"
    desk.guard.prepare("ckpt-1")
    pinned.write_text("rotten")
    assert desk.guard.put_back("ckpt-1") == {"path": str(path), "moved": []}

    pinned.write_text("good 1")
    path.unlink()
    desk.guard.prepare("ckpt-1")
    pinned.write_text("rotten")
    assert list(desk.out.iterdir()) == [desk.out / ".a.pt.ckpt-1"]
    desk.guard.put_back("ckpt-1")
    assert path.read_text() == "good 1" and list(desk.out.iterdir()) == [path]


def test_what_the_job_wrote_as_it_was_stopped_does_not_count(desk):
    """It lay unhurt in its place a moment ago; the pinned copy takes its place."""
    path = desk.write("a.pt", "good 1", step=9)
    desk.turn()
    desk.guard.prepare("ckpt-1")
    path.write_text("saved on the way out")

    (moved,) = desk.guard.put_back("ckpt-1")["moved"]

    assert path.read_text() == "good 1" and Path(moved).read_text() == "saved on the way out"


def test_what_cannot_be_put_back_is_known_beforehand(desk):
    """The job's files are as they were; what was prepared and is not used leaves nothing."""
    path = desk.write("a.pt", "good 1", step=9)
    desk.turn()
    path.unlink()
    desk.guard.prepare("ckpt-1")
    desk.guard.close()
    assert list(desk.out.iterdir()) == []

    desk.open()
    (desk.run / "checkpoints/ckpt-1/data/a.pt").write_text("rotten")
    with pytest.raises(StoreError, match="pinned copy of ckpt-1 is damaged"):
        desk.guard.prepare("ckpt-1")
    with pytest.raises(StoreError, match="ckpt-7 is not known"):
        desk.guard.prepare("ckpt-7")
    assert list(desk.out.iterdir()) == []


def test_a_prepared_one_stays_pinned(desk):
    """Newer good ones do not drop it meanwhile."""
    for number in range(1, 5):
        desk.write("a.pt", f"good {number}", step=number * 10)
        desk.turn()
        if number == 2:
            desk.guard.prepare("ckpt-1")
        desk.turn()
        desk.turn()

    assert desk.pinned() == ["ckpt-1", "ckpt-3", "ckpt-4"]


def test_a_disk_that_refuses_is_told_as_such(desk):
    """A directory that became a file lets nobody in."""
    path = desk.write("d/a.pt", "good 1", step=9)
    desk.turn()
    shutil.rmtree(path.parent)
    path.parent.write_text("a file")

    for what in (desk.guard.prepare, desk.guard.put_back):
        with pytest.raises(StoreError, match="ckpt-1 cannot be put back"):
            what("ckpt-1")


def test_a_register_that_cannot_be_written_is_told(desk):
    """What was put back is in its place all the same."""
    path = desk.write("a.pt", "good 1", step=9)
    desk.turn()
    path.unlink()
    (desk.run / "checkpoints.json").unlink()
    (desk.run / "checkpoints.json").mkdir()

    assert desk.guard.put_back("ckpt-1")["path"] == str(path)

    assert path.read_text() == "good 1"
    assert "register of checkpoints cannot be written" in desk.guard.poll()[0].message


def test_a_damaged_copy_is_not_put_back(desk):
    """It says so, and leaves everything as it was; so with what is not known or not good."""
    path = desk.write("a.pt", "good 1", step=9)
    desk.turn()
    path.write_text("torn")
    (desk.run / "checkpoints/ckpt-1/data/a.pt").write_text("good 2")

    with pytest.raises(StoreError, match="pinned copy of ckpt-1 is damaged"):
        desk.guard.put_back("ckpt-1")
    assert path.read_text() == "torn"
    with pytest.raises(StoreError, match="ckpt-7 is not known"):
        desk.guard.put_back("ckpt-7")


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
