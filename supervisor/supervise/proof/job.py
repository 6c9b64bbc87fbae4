"""A job that is not there: it answers every action as a healthy one would.

The actions' own `perform` runs against it, so what an action asks for and how it judges the answer
are part of every scenario.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from ..errors import ActionError

TERMINATED = -15  # a job that obeys TERM
EVERY, KEEP = 25, 4  # savepoints, where the policy keeps none of its own


class FakeJob:
    """The state of the job that actions change.

    Attributes:
        step: newest step that was made. next_step: the one that comes.
        rollbacks: how often it went back.
        paused_until: time at which the lease of a pause ends, None while it runs.
        returncode: how it ended, None while it has not.
        skipping: updates that will not be applied.
    """

    def __init__(self, savepoints: Mapping[str, Any], world_size: int) -> None:
        self.world_size = world_size
        self.every = int(savepoints.get("every", EVERY))
        self.kept: deque[int] = deque(maxlen=int(savepoints.get("keep", KEEP)))
        self.now_ns = 0
        self.step, self.next_step = -1, 0
        self.attempt = self.rollbacks = self.skipping = 0
        self.paused_until: int | None = None
        self.returncode: int | None = None
        self._scale, self._ramp, self._since = 1.0, 0, 0

    def made(self) -> None:
        """One more step was made."""
        self.step, self.next_step = self.next_step, self.next_step + 1
        self.skipping = max(0, self.skipping - 1)
        self._since += 1
        if self.step % self.every == 0:
            self.kept.append(self.step)

    def rate(self) -> float:
        """Return what the learning rate of the next step is multiplied by."""
        if self._scale == 1.0 or not self._ramp:
            return self._scale
        return self._scale + (1.0 - self._scale) * min(1.0, self._since / self._ramp)

    # ── as actions see it (core.action.Job) ───────────────────────────────────────────────────────

    def command(
        self, verb: str, args: Mapping[str, Any], *, key: str, deadline_s: float
    ) -> dict[str, Any]:
        """Do what the probe would do, at the end of the newest step."""
        done = getattr(self, f"_{verb}", None)
        answer = dict(args) if done is None else done(args)
        return {"ack_step": self.step, "ranks": self.world_size, **answer}

    def _pause(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self.paused_until = self.now_ns + int(float(args.get("lease_s", 900.0)) * 1e9)
        return {"paused_step": self.step}

    def _resume(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self.paused_until = None
        return {"resumed": True}

    def _savepoint(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self.kept.append(self.step)
        return {"step": self.step, "bytes": 1 << 20}

    def _lr_scale(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self._scale, self._ramp = float(args["value"]), int(args.get("rewarm_steps") or 0)
        self._since = 0
        return {"lr_scale": self._scale}

    def _skip_step(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self.skipping = int(args["count"])
        return {"will_skip": self.skipping}

    def _rollback(self, args: Mapping[str, Any]) -> dict[str, Any]:
        before = int(args["before_step"])
        found = [step for step in self.kept if step < before]
        if not found:
            raise ActionError(f"no savepoint before step {before}: there are {list(self.kept)}")
        self.step, self.next_step = found[-1], found[-1] + 1
        while self.kept and self.kept[-1] > self.step:
            self.kept.pop()
        self.attempt += 1
        self.rollbacks += 1
        rewarm = args.get("rewarm")
        if rewarm:
            self._scale, self._ramp, self._since = float(rewarm["start"]), int(rewarm["steps"]), 0
        return {"step": self.step, "attempt": self.attempt}

    def snapshot(self, incident: str, *, key: str, deadline_s: float) -> dict[str, Any]:
        """Say that the evidence is there."""
        return {
            "path": f"incidents/{incident}/snapshot-1",
            "sha256": "0" * 64,
            "bytes": 1 << 20,
            "files": ["metrics.csv"],
        }

    def work(self, within_s: float) -> dict[str, float]:
        """Say that it hangs: it uses nothing."""
        return {"cpu_s": 0.0, "bytes": 0.0}

    def stop(self, *, grace_s: float, term_s: float, exit_code: int) -> dict[str, Any]:
        """End as it was asked to."""
        self.returncode = TERMINATED
        return {"returncode": TERMINATED, "survivors": [], "exit_code": exit_code}
