"""A fake job: it answers every action as a healthy job would.

The real `perform` of the actions runs against it, so their requests and their checks of the answer
are part of every scenario.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from msgspec import Struct

from ..core.model.payload import Json, Payload, Rewarm
from ..core.model.policy import Savepoints
from ..errors import ActionError

TERMINATED = -15  # it exits on SIGTERM
EVERY = 25  # steps between savepoints, when the policy sets none
USUAL_CLIP, USUAL_SCALE = 1.0, 65536.0  # the job's own clip bound, GradScaler's initial scale

Answer = Mapping[str, Json]


class Order(Struct, frozen=True):
    """The arguments of a command, all of them: each action gives some."""

    lease_s: float = 900.0
    path: str | None = None
    value: float = 1.0
    rewarm_steps: int | None = None
    rewarm: Rewarm | None = None
    lift: bool | None = None
    before_step: int = 0
    limit: float | None = None
    within: float = 1.0
    count: int = 0
    max_norm: float | None = None
    factor: float | None = None
    steps: int | None = None
    window: int | None = None
    sigma: float | None = None
    scale: float | None = None
    incident: str = ""
    step: int = 0
    attempt: int = 0
    checkpoint: str = ""
    add: tuple[Mapping[str, str] | str, ...] = ()


class FakeJob:
    """The state of the job that actions change.

    Attributes:
        step: newest finished step. next_step: the one after it.
        rollbacks: number of rollbacks, in process or by relaunch. launches: of its process.
        paused_until: time at which the pause lease ends, None while it runs.
        returncode: exit status, None while it runs.
        skipping: number of updates to skip.
        clip_bound: limit of the gradient norm, None without one.
        rates: learning rates asked for, by step. rate_limit: most of it, None without a limit.
        generation: of the quarantine.
    """

    def __init__(self, savepoints: Savepoints | None, world_size: int) -> None:
        self.world_size = world_size
        savepoints = savepoints or Savepoints(every=EVERY)
        self.every = savepoints.every
        self.kept: deque[int] = deque(maxlen=savepoints.keep)
        self.now_ns = 0
        self.step, self.next_step = -1, 0
        self.attempt = self.rollbacks = self.skipping = 0
        self.launches = 1
        self.generation = 0
        self.paused_until: int | None = None
        self.returncode: int | None = None
        self._scale, self._ramp, self._since = 1.0, 0, 0
        self.clip_bound: float | None = None
        self.rates: dict[int, float] = {}
        self.rate_limit: float | None = None
        self._clipped = 0  # remaining steps with it; 0 with a bound: until lifted

    def finish_step(self) -> None:
        """Finish one step."""
        self.step, self.next_step = self.next_step, self.next_step + 1
        self.skipping = max(0, self.skipping - 1)
        self._since += 1
        if self._clipped:
            self._clipped -= 1
            self.clip_bound = self.clip_bound if self._clipped else None
        if self.step % self.every == 0:
            self.kept.append(self.step)

    def lr_factor(self) -> float:
        """Return the factor on the learning rate of the next step."""
        if self._scale == 1.0 or not self._ramp:
            return self._scale
        return self._scale + (1.0 - self._scale) * min(1.0, self._since / self._ramp)

    # ── the interface `core.model.action.Job` ─────────────────────────────────────────────────────

    def command(
        self, verb: str, args: Mapping[str, Json], *, key: str, deadline_s: float
    ) -> Answer:
        """Carry out a command as the probe would, at the end of the newest step."""
        handler = getattr(self, f"_{verb}", None)
        if verb == "raise_sampling":
            return {"ack_step": self.step, "ranks": self.world_size, "sampling": dict(args)}
        answer = dict(args) if handler is None else handler(Payload(args).parse(Order))
        return {"ack_step": self.step, "ranks": self.world_size, **answer}

    def _pause(self, order: Order) -> Answer:
        self.paused_until = self.now_ns + int(order.lease_s * 1e9)
        return {"paused_step": self.step}

    def _resume(self, order: Order) -> Answer:
        self.paused_until = None
        return {"resumed": True}

    def _savepoint(self, order: Order) -> Answer:
        self.kept.append(self.step)
        return {"step": self.step, "bytes": 1 << 20}

    def _checkpoint(self, order: Order) -> Answer:
        path = order.path or f"ckpt.supervise-{self.next_step}.pt"
        return {"path": path, "step": self.next_step, "how": "on-demand"}

    def _lr_scale(self, order: Order) -> Answer:
        self._scale, self._ramp = order.value, order.rewarm_steps or 0
        self._since = 0
        return {"lr_scale": self._scale}

    def _hold_rate(self, order: Order) -> Answer:
        if order.lift:
            self.rate_limit = None
            return {"groups": 0}
        previous_step = max((step for step in self.rates if step < order.before_step), default=None)
        if order.limit is not None:
            self.rate_limit = order.limit
        elif previous_step is not None:
            self.rate_limit = order.within * self.rates[previous_step]
        return {"rate_limit": self.rate_limit, "groups": 1}

    def _skip_step(self, order: Order) -> Answer:
        self.skipping = order.count
        return {"will_skip": self.skipping}

    def _clip(self, order: Order) -> Answer:
        max_norm = order.max_norm or USUAL_CLIP * (order.factor or 0.0)
        self.clip_bound = None if order.lift else max_norm
        self._clipped = order.steps or 0
        return {"clip_bound": self.clip_bound}

    def _update_clip(self, order: Order) -> Answer:
        rule = {"window": order.window, "sigma": order.sigma}
        return {"update_clip": None if order.lift else rule}

    def _loss_scale(self, order: Order) -> Answer:
        return {"loss_scale": order.scale or USUAL_SCALE, "backoff": 0.5}

    def _profile(self, order: Order) -> Answer:
        return {"path": f"incidents/{order.incident}/profile-{self.next_step}-rank-0.json"}

    def _check_weights(self, order: Order) -> Answer:
        """Find the weights bad: with good ones no scenario would come to a remedy."""
        return {"loss": 1e6, "was": [[order.before_step - 1, 1.0]]}

    def _rollback(self, order: Order) -> Answer:
        limit = order.before_step
        steps = [step for step in self.kept if step < limit]
        if not steps:
            raise ActionError(f"no savepoint before step {limit}: there are {list(self.kept)}")
        while self.kept[-1] > steps[-1]:
            self.kept.pop()
        self._begin_attempt(self.attempt + 1, order.rewarm)
        return {"step": steps[-1], "attempt": self.attempt, "from_step": self.step}

    def _begin_attempt(self, attempt: int, rewarm: Rewarm | None) -> None:
        self.attempt = attempt
        self.rollbacks += 1
        if rewarm is not None:
            self._scale, self._ramp, self._since = rewarm.start, rewarm.steps, 0

    def snapshot(self, incident: str, *, key: str, deadline_s: float) -> Answer:
        """Report that evidence was taken."""
        return {
            "path": f"incidents/{incident}/snapshot-1",
            "sha256": "0" * 64,
            "bytes": 1 << 20,
            "files": ["metrics.csv"],
        }

    def relaunch(self, args: Mapping[str, Json], *, key: str, deadline_s: float) -> Answer:
        """Restart from the checkpoint as a new process without savepoints."""
        order, ended = Payload(args).parse(Order), self.returncode is not None
        self.returncode, self.paused_until, self.skipping = None, None, 0
        self._scale, self._ramp = 1.0, 0
        self.clip_bound, self._clipped = None, 0
        self.kept.clear()
        self.launches += 1
        self.step, self.next_step = order.step, order.step + 1
        self._begin_attempt(order.attempt, order.rewarm)
        return {
            "pid": self.launches,
            "attempt": self.attempt,
            "checkpoint": order.checkpoint,
            "how": "ended" if ended else "interrupt",
            "moved": [],
        }

    def quarantine(self, args: Mapping[str, Json], *, key: str, deadline_s: float) -> Answer:
        """Advance the generation; with several ranks it takes effect at the next launch."""
        self.generation += 1
        timing = "now" if self.world_size == 1 else "at the next launch"
        entries = len(Payload(args).parse(Order).add)
        return {
            "generation": self.generation,
            "held": self.generation,
            "takes_effect": timing,
            "entries": entries,
            "ranks": self.world_size,
        }

    def work(self, within_s: float) -> dict[str, float]:
        """Report no activity: the job hangs."""
        return {"cpu_s": 0.0, "bytes": 0.0}

    def stop(self, *, grace_s: float, term_s: float, exit_code: int) -> Answer:
        """End as requested."""
        self.returncode = TERMINATED
        return {"returncode": TERMINATED, "survivors": [], "exit_code": exit_code}
