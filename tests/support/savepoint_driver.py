"""Runs training scripts with savepoints at the boundary behind every optimizer step.

The smallest probe that can: it wraps `Optimizer.profile_hook_step`, counts steps, and takes and
restores savepoints as a plan says. Started by the tests as one process that has torch imported and
forks a child per script, so that a script costs 0.1 s and not an import of torch. It must be
compiled under a file name inside the probe's directory, since its frames are the probe's.

Reads one JSON object per line: {"script", "argv", "plan", "out"}; answers with the exit code. The
child's stdout goes to `out`, what happened at the boundaries to `out` + ".events".
"""

import functools
import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path

import torch
from torch.optim import Optimizer

from supervise_probe.savepoints.manager import Busy, CannotRestore, Savepoints
from supervise_probe.torch_state.registry import Registry


class Driver:
    """A plan, carried out.

    every: savepoint behind every n-th step, from the first on. keep, max_bytes, spill,
    max_disk_bytes: of Savepoints; a savepoint on its way to the disk is waited for.
    rollbacks: [{"at", "before"}], each carried out once. last: class name of the optimizer
    that ends a step, where there are several. spare: {step: before}, what is spared from then on.
    """

    def __init__(self, plan, events):
        self.every = plan.get("every", 0)
        self.rollbacks = list(plan.get("rollbacks", ()))
        self.last = plan.get("last")
        self.spare = {int(at): before for at, before in plan.get("spare", {}).items()}
        self.events = events
        self.registry = Registry()
        self.registry.install(torch)
        keep, max_bytes = plan.get("keep", 4), plan.get("max_bytes", 1 << 30)
        self.savepoints = Savepoints(
            torch,
            self.registry,
            keep,
            max_bytes,
            plan.get("spill"),
            max_disk_bytes=plan.get("max_disk_bytes"),
        )
        self.step = 0

    def emit(self, **event):
        self.events.write(json.dumps(event) + "\n")
        self.events.flush()

    def boundary(self, optimizer):
        """Between two steps: take or restore a savepoint as the plan says."""
        self.registry.optimizers.add(optimizer)
        if self.last not in (None, type(optimizer).__name__):
            return
        if self.step in self.spare:
            self.savepoints.retain_before(self.spare[self.step])
        due = self.rollbacks and self.rollbacks[0]["at"] == self.step
        try:
            if due:
                plan = self.rollbacks.pop(0)
                result, extra = self.savepoints.restore(plan["before"])
                assert extra == result["step"]
                self.emit(restored=result, steps=self.savepoints.steps)
            elif self.every and self.step % self.every == 0:
                taken = self.savepoints.take(self.step, 0, self.step)
                self.emit(taken={**taken, "allocated": allocated(self.savepoints)})
                while self.savepoints.busy:
                    time.sleep(0.001)
                self.emit(disk_errors=self.savepoints.disk_errors())
        except Busy as problem:
            self.emit(busy=str(problem), steps=self.savepoints.steps)
        except CannotRestore as refusal:
            self.emit(refused=str(refusal), step=self.step, steps=self.savepoints.steps)
        self.step += 1


def allocated(savepoints):
    """Bytes of all buffers that are in memory, each counted once."""
    slots = (slot for saved in savepoints._store.savepoints for slot in saved.copies.slots)
    buffers = {id(slot.buffer): slot.buffer for slot in slots if slot.buffer is not None}
    return sum(buffer.numel() * buffer.element_size() for buffer in buffers.values())


def install(plan, events):
    """Patch torch in this process; returns the driver."""
    driver = Driver(plan, events)
    original = Optimizer.profile_hook_step

    def profile_hook_step(step):
        inner = original(step)

        @functools.wraps(step)
        def wrapper(self, *args, **kwargs):
            result = inner(self, *args, **kwargs)
            driver.boundary(self)
            return result

        return wrapper

    Optimizer.profile_hook_step = staticmethod(profile_hook_step)
    return driver


def run(job):
    """In the child: run one script to its end."""
    target = os.open(job["out"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    os.dup2(target, 1)
    with Path(job["out"] + ".events").open("w", encoding="utf-8") as events:
        driver = install(job["plan"], events)
        sys.argv = [job["script"], *job["argv"]]
        sys.path.insert(0, str(Path(job["script"]).parent))
        try:
            runpy.run_path(job["script"], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.stdout.flush()
            driver.emit(end=driver.savepoints.steps)


def serve():
    """In the parent: one forked child per line of stdin."""
    torch.set_num_threads(1)
    torch.optim.Rprop([torch.zeros(1, requires_grad=True)])  # imports what every job needs
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(json.loads(line))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
