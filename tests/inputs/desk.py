"""A guard over real files, driven by hand, and a job beside it that writes them.

The interpreter that verifies is a fake, so that no test needs torch: a file's first word is its
verdict.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import supervise_offline
from supervise.checkpoints import registry as register
from supervise.checkpoints.save_report import RunPosition
from supervise.checkpoints.service import CheckpointService
from supervise.core.model.events import Notice

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
    if word == "slow":
        here = os.path.dirname(sys.argv[0])
        held = os.path.exists(os.path.join(here, "hold"))
        open(os.path.join(here, "begun"), "w").close()
        while held and os.path.exists(os.path.join(here, "hold")):
            time.sleep(0.005)
        time.sleep(0.0 if held else 1.0)
        word = open(os.path.join(folder, names[0])).read().split()[1]
    if word == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "memory":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "hang":
        open(os.path.join(os.path.dirname(sys.argv[0]), "hanging"), "w").close()
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

    def __init__(self, folder, out="out", run="run"):
        self.out, self.run = folder / out, folder / run
        self.out.mkdir(exist_ok=True)
        self.run.mkdir()
        self.tokenizer = folder / "tokenizer.json"
        self.tokenizer.write_text("{}")
        self.python = folder / "python"
        self.python.write_text(VERIFIER)
        self.python.chmod(0o755)
        self.moment = RunPosition(values={"train_loss_raw": 2.5})
        self.told = []
        self.open()

    def open(self, limit_s=60.0, share=1.0, soon_s=60.0, **form):
        self.guard = CheckpointService(
            {**FORM, **form},
            self.run,
            self.out,
            lambda: self.moment,
            facts={"argv": ["python", "train.py"]},
            data=["../tokenizer.json"],
            every_s=0.0,
            limit_s=limit_s,
            share=share,
            soon_s=soon_s,
        )

    def write(self, name, text, step=None):
        """Write a file; with a step, the probe tells of it."""
        path = Path(os.path.normpath(self.out / name))
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        if step is not None:
            self.tell(path, step)
        return path

    def tell(self, path, step, **about):
        found = path.stat()
        data = {
            "path": str(path),
            "file": {
                "device": found.st_dev,
                "inode": found.st_ino,
                "size": found.st_size,
                "mtime_ns": found.st_mtime_ns,
            },
            "python": str(self.python),
        }
        data |= {"seconds": 0.5, **about}
        now_ns = time.monotonic_ns()
        self.guard.saved(Notice(now_ns, "checkpoint-saved", "", 0, step + 1, data))

    def turn(self):
        """Look twice, do all work, and return what was told: (id, step, ok)."""
        self.guard.look()
        self.guard.look(closely=True)
        while self.guard.work():
            pass
        news = self.guard.poll()
        self.told += news
        return [(e.data["id"], e.data["step"], e.data["ok"]) for e in news if e.data]

    def verify_now(self, **within):
        """Hurry, and wait until the guard says that it is done."""
        self.guard.verify_now(**within)
        while self.guard.is_verifying_now:
            time.sleep(0.01)

    def entry(self, name):
        return next(e for e in self.entries() if e["id"] == name)

    def entries(self):
        return register.read(self.run)["checkpoints"]

    def states(self, state):
        return [e["id"] for e in self.entries() if e["state"] == state]

    def pinned(self):
        return [e["id"] for e in self.entries() if e["pinned"]]


class Overwriter:
    """Writes one file over and over, and tells of each; to be verified takes longer than that."""

    def __init__(self, desk, name="ckpt.pt", word="good", *, rename=False):
        self.step, self.largest = 0, 0
        self._desk, self._name, self._word, self._rename = desk, name, word, rename
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def _run(self):
        while not self._over.wait(0.25):
            self.step += 10
            name = "fresh.partial" if self._rename else self._name
            path = self._desk.write(name, f"slow {self._word} {self.step}")
            path = path.rename(self._desk.out / self._name) if self._rename else path
            self._desk.tell(path, self.step)
            copies = self._desk.run.glob("checkpoints/.ckpt-*")
            self.largest = max(self.largest, len(list(copies)))

    def run_until(self, told):
        """Wait until the guard told of that many; return them."""
        found, until = [], time.monotonic() + 60
        while len(found) < told and time.monotonic() < until:
            found += [e for e in self._desk.guard.poll() if e.data]
            time.sleep(0.05)
        return found


@contextmanager
def slowly(desk, work):
    """While `work`, in a thread, verifies what is slow; it goes on when the block is left."""
    begun, hold = (desk.python.with_name(name) for name in ("begun", "hold"))
    begun.unlink(missing_ok=True)
    hold.touch()
    worker = threading.Thread(target=work)
    worker.start()
    while worker.is_alive() and not begun.exists():
        time.sleep(0.005)
    yield
    hold.unlink()
    worker.join()


def overtake(desk, save):
    """Verify what lies there; meanwhile `save` writes it again."""
    desk.guard.look()
    desk.guard.look()
    with slowly(desk, desk.guard.work):
        save()


def copies(desk):
    return list(desk.run.glob("checkpoints/.ckpt-*"))
