"""The process of an evaluation: its script, the file that it reads, and its memory."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from supervise.checkpoints import (
    Evaluation,
    Register,
    VerifierProcess,
    evaluate_checkpoint,
    has_group_oom_kill,
    stamp_files,
)
from supervise.core.model import Evaluate
from tests.support.supervised_run import FAST_TORCH

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
PROGRAM = Path(__file__).parents[2] / "probes" / "supervise_offline" / "evaluation.py"

SCRIPT = """
import os, sys, torch
sys.path[:0] = [{probes!r}]
from supervise_probe.torch_state import pickle_structure
{begin}
class Net(torch.nn.Linear):
    pass
def main():
    net = Net(4, 3)
    open("structure.pkl", "wb").write(pickle_structure(torch, net, []))
    torch.save(net.state_dict(), "c.pt")
    x = torch.ones(2, 4)
    batch = dict(args=(x,), kwargs={{}}, targets=None, device="cpu", autocast=False,
                 dtype=torch.bfloat16, modes=[True])
    torch.save(batch, "batch.pt")
    print(float(net(x).detach().double().square().mean()), file=open("value", "w"))
{end}
"""
GUARDED = "if __name__ == '__main__':\n    main()"


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Run a script that leaves what a probe does; return how its checkpoint is evaluated."""
    monkeypatch.chdir(tmp_path)

    def run(begin, end):
        text = SCRIPT.format(probes=str(PROGRAM.parents[1]), begin=begin, end=end)
        (tmp_path / "job.py").write_text(text)
        environ = {**os.environ, "PYTHONPATH": FAST_TORCH}
        subprocess.run([sys.executable, "job.py"], check=True, env=environ)
        facts = {
            "path": str(tmp_path / "batch.pt"),
            "value": float((tmp_path / "value").read_text()),
            "model": hashlib.sha256((tmp_path / "structure.pkl").read_bytes()).hexdigest()[:32],
        }
        (tmp_path / "structure.pkl").rename(tmp_path / f"structure.{facts['model']}.pkl")
        path = str(tmp_path / "c.pt")
        register = Register(tmp_path)
        entry = register.add(path, step=9, state="verified", probe_batch=facts)
        entry.stamp, entry.python = stamp_files(path), sys.executable

        def evaluate(free=4 << 30, **settings):
            pinned = tmp_path / "checkpoints" / entry.id / "data" / "c.pt"
            return evaluate_checkpoint(
                VerifierProcess(()), [], entry, pinned, Evaluate(**settings), free
            )

        return evaluate

    return run


def test_a_script_with_a_guard_gives_its_classes_and_what_ends_the_process_is_told(saved, tmp_path):
    """By the process as it is started; what the job prints is no answer."""
    evaluate = saved(
        "import atexit; atexit.register(print, 'bye')\nGREETING = print('noise')", GUARDED
    )

    good, full = evaluate(), evaluate(free=160 << 20)

    assert good.reason == "" and good.now == good.was
    assert good.metrics["checkpoint_proved"] == 1.0 and good.metrics["checkpoint_unknown"] == 0.0
    assert full.metrics == {"checkpoint_unknown": 1.0} and "memory" in full.reason.lower()


def test_a_script_without_a_guard_is_imported_only_where_that_is_allowed(saved, tmp_path):
    """And then without what it does."""
    evaluate = saved("open('imported', 'a').write('x')", "main()")

    refused, allowed = evaluate(), evaluate(reimport=True)

    assert "no `__main__` guard" in refused.reason
    assert allowed.reason == "" and allowed.now == allowed.was
    assert (tmp_path / "imported").read_text() == "x"


class Overwriting:
    """Answers with what it is asked for, while the job writes its file again."""

    def __init__(self, path):
        self.path, self.requests, self.memory = path, [], []

    def evaluate(self, request, python, limit_s):
        self.requests.append(request["checkpoint"])
        self.memory.append(request["memory"])
        self.path.write_text("a newer one" * len(self.requests))
        return Evaluation(reason=Path(request["previous"]).name)


def test_a_file_that_is_overwritten_is_read_from_its_pin_and_compared_with_the_one_before(tmp_path):
    """And root reads nothing of other users."""
    register, batches = Register(tmp_path), tmp_path / "batches"
    path, digest = tmp_path / "c.pt", "0" * 32
    facts = {"path": str(batches / "b.pt"), "value": 1.0, "model": digest}
    batches.mkdir()
    several = [
        register.add(str(path), step=step, state="verified", probe_batch=facts)
        for step in (100, 200, 300)
    ]
    for name in ("b.pt", f"structure.{digest}.pkl", *(f"outputs.{e.id}.pt" for e in several[:2])):
        (batches / name).touch()
    path.touch()
    entry, earlier = several[-1], several[:2]
    entry.stamp = stamp_files(str(path))
    pinned = tmp_path / "checkpoints" / entry.id / "data" / "c.pt"
    pinned.parent.mkdir(parents=True)
    shutil.copy(path, pinned)
    process = Overwriting(path)

    found = evaluate_checkpoint(process, earlier, entry, pinned, Evaluate(), 1 << 30)

    assert process.requests == [str(path), str(pinned)]
    assert found.reason == f"outputs.{several[1].id}.pt"
    pinned.unlink()
    entry.stamp = stamp_files(str(path))
    unread = evaluate_checkpoint(process, earlier, entry, pinned, Evaluate(), 1 << 30)
    assert "was changed while it was read" in unread.reason
    if os.geteuid() == 0:
        entry.stamp = stamp_files(str(path))
        os.chown(batches / "b.pt", 1000, 1000)
        refused = evaluate_checkpoint(process, earlier, entry, pinned, Evaluate(), 1 << 30)
        assert "root" in refused.reason and len(process.requests) == 3


def test_memory_is_that_of_the_policy_and_without_it_no_job_is_ended_with_an_evaluation(tmp_path):
    register, digest = Register(tmp_path), "0" * 32
    facts = {"path": str(tmp_path / "b.pt"), "value": 1.0, "model": digest}
    path = tmp_path / "c.pt"
    for file in (path, tmp_path / "b.pt", tmp_path / f"structure.{digest}.pkl"):
        file.touch()
    entry = register.add(str(path), step=100, state="verified", probe_batch=facts)
    pinned = tmp_path / "checkpoints" / entry.id / "data" / "c.pt"
    process = Overwriting(path)

    def evaluate(free, *, fatal=False, **settings):
        entry.stamp = stamp_files(str(path))
        return evaluate_checkpoint(
            process, [], entry, pinned, Evaluate(**settings), free, is_fatal=lambda: fatal
        )

    refused = evaluate(8 << 30, fatal=True)
    evaluate(8 << 30)
    evaluate(None)
    evaluate(8 << 30, fatal=True, memory_gb=0.5)

    assert "memory.oom.group" in refused.reason and "memory_gb" in refused.reason
    assert process.memory == [4 << 30, 2 << 30, 500_000_000]


@pytest.mark.parametrize("where", ["", "pod", "pod/container"])
def test_a_cgroup_that_ends_as_a_whole_is_seen_from_below(where, tmp_path):
    """`memory.oom.group` of one around ours."""
    (tmp_path / "pod" / "container").mkdir(parents=True)
    membership = tmp_path / "cgroup"
    membership.write_text("4:memory:/other\n0::/pod/container\n")
    assert not has_group_oom_kill(membership, tmp_path)
    (tmp_path / where / "memory.oom.group").write_text("1\n")
    assert has_group_oom_kill(membership, tmp_path)
