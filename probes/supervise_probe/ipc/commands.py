"""The verbs of the supervisor, carried out at a step boundary: the job stands right behind its
optimizer step, the gradients are used, the next batch is not yet read.

Every target is absolute, so a command that is repeated changes nothing. What a pause waits on is
outside the guard: an exception of the job's own signal handlers must get through. A pause that
is not renewed ends by itself; only then, or when such an exception ends it, is the notice
`pause-ended` sent. A resume or a stop is answered, and sends none. With several ranks, a verb that
changes training comes behind a fence only: one rank alone would leave the others behind. What only
looks may name the step (`at_step`) that it is to be of, on all ranks.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Optional

from ..context import Refused
from ..runtime import evidence
from ..runtime.guard import describe_error
from . import fences
from .segment import Command

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..torch_state.learning_rate import LearningRate
    from ..torch_state.records import Optimizers, Position
    from .segment import Mailbox

COMPARED = 16  # newest boundaries that the ranks compare before they act together
VERDICT_POLL_S = 0.0005  # between two looks for a verdict; it is mostly there already
MOST_WAIT_S = 30.0


class Fence(NamedTuple):
    """What a rank has promised.

    Attributes:
        id: of the file of its verdict. step: the boundary that is not passed without one.
        key, verb, args: of the command. wait_s: how long the rank waits there.
    """

    id: str
    step: int
    key: str
    verb: str
    args: dict[str, Any]
    wait_s: float


class Boundaries:
    """The newest boundaries of a rank, each with the number of collectives of the whole job so far,
    and when it was.

    All ranks of the default group take part in each of its collectives. So ranks that have made
    another number of them by the end of one step do not mean the same step by its number. Where
    the number does not grow, as in a pipeline or a mesh with groups of its own, the times show
    whether the ranks wait for each other.
    """

    def __init__(self, torch: Any, position: Position) -> None:
        # No reference to a group is kept: it would outlive its end.
        self._groups: Any = getattr(torch.distributed, "GroupMember", None)
        self._position = position
        self._seen: deque[tuple[int, int, int]] = deque(maxlen=COMPARED)

    def record_collective_number(self) -> None:
        """A step has just ended: 0.8 us."""
        try:
            number = self._groups.WORLD._get_sequence_number_for_group()
        except (AttributeError, RuntimeError):  # there is no such group, or it does not count
            return
        self._seen.append((self._position.step - 1, number, monotonic_ns()))

    def newest(self) -> list[tuple[int, int, int]]:
        """Return each step, the number of collectives by its end, and the time of that in ns of
        CLOCK_MONOTONIC, oldest first."""
        return list(self._seen)


def elapsed_s(since_ns: int) -> float:
    """Return the time since then, in seconds."""
    return (monotonic_ns() - since_ns) / 1e9


Verb = Callable[[dict[str, Any]], dict[str, Any]]

POLL_S = 0.05
EARLY = ("hold_rate",)  # carried out before the update that is about to be made


class Commands:
    """Reads the mailbox at each boundary and acts.

    Args:
        batches: returns the newest ones, for evidence.
        out_of_reach: returns why the training cannot be changed from here, "" where it can.
        hook: is called at the first boundary.
    """

    def __init__(
        self,
        context: ProbeContext,
        mailbox: Mailbox,
        rate: LearningRate,
        optimizers: Optimizers,
        batches: Callable[[], list[Mapping[str, Any]]],
        out_of_reach: Callable[[], str],
        hook: Optional[Callable[[], None]] = None,
    ) -> None:
        self._torch, self._guard = context.torch, context.guard
        self._position, self._reporter = context.position, context.reporter
        self._mailbox, self._rate, self._optimizers = mailbox, rate, optimizers
        self._batches, self._out_of_reach = batches, out_of_reach
        self._first = hook
        # The longest that a pause lasts unless it is renewed, whatever is asked for.
        self._lease_s = context.config.lease_s
        self._part = context.guard.part("commands", share=1.0)
        self._refusals = context.guard.part("refusals", share=1.0)
        self._paused_ns = 0
        self._until_ns = 0
        self._renewal_ns = 0  # the newest renewal that was seen
        self._key = self._paused_by = ""  # of the command under way; of the newest pause
        self._stopping = False
        self._arrived: list[Any] = []
        self._doers: list[Any] = [self]
        self._shm = context.config.shm
        self._fence: Optional[Fence] = None  # what this rank has promised
        self._boundaries: Optional[Boundaries] = None
        if self._position.world_size > 1:
            self._boundaries = Boundaries(context.torch, self._position)

    def register(self, *doers: Any) -> None:
        """Let the methods `do_<verb>` of these carry out their verbs too."""
        self._doers += doers

    def run(self) -> None:
        """Carry out what has arrived; return when the job may go on.

        Raises:
            KeyboardInterrupt: after a `stop` was acknowledged.
        """
        if self._boundaries is not None:
            self._boundaries.record_collective_number()
        if not self._arrived and self._fence is None:
            return
        if not self._part.on:
            self._guard.run(self._refusals, self._refuse_all)
        self._guard.run(self._part, self._handle_all)
        try:
            self._meet_fence()
            while self._paused_ns and self._part.on:
                time.sleep(POLL_S)
                self._guard.run_while_waiting(self._part, self._while_paused)
                self._meet_fence()
        except BaseException:  # of a signal handler: whoever catches it has a job that goes on
            self._guard.run(self._part, self._end_pause, "an exception interrupted the pause")
            raise
        if self._stopping:
            self._stopping = False
            raise KeyboardInterrupt("stopped by the supervisor")

    def fetch(self) -> None:
        """Look whether anything has arrived; for `run`."""
        if self._first is not None:
            hook, self._first = self._first, None
            self._guard.run(self._part, hook)
        self._mailbox.mark_boundary(self._position.step)
        self._arrived += self._mailbox.poll()

    def run_early_commands(self) -> None:
        """Carry out what the first update that it can reach needs; the rest waits for `run`."""
        arrived = self._mailbox.poll()
        if arrived:
            early = [command for command in arrived if command.verb in EARLY and self._part.on]
            self._arrived += [command for command in arrived if command not in early]
            self._guard.run(self._part, self._handle, early)

    def _refuse_all(self) -> None:
        """Say why nothing is carried out here any more: silence would have no reason."""
        arrived, self._arrived = self._arrived, []
        reason = f"commands are off in this process: {self._part.reason}"
        for command in arrived:
            step = self._position.step - 1
            self._mailbox.ack(command, step, False, {"refused": True}, reason)

    def _handle_all(self) -> None:
        arrived, self._arrived = self._arrived, []
        if self._boundaries is not None and not self._paused_ns:  # a pause holds all at one step
            step = self._position.step - 1
            self._arrived = [
                command for command in arrived if command.args.get("at_step", step) > step
            ]
            arrived = [command for command in arrived if command.args.get("at_step", step) <= step]
        self._handle(arrived)

    def _handle(self, arrived: list[Any], at_fence: Optional[Mapping[str, float]] = None) -> None:
        for command in arrived:
            began = time.monotonic_ns()
            result: dict[str, Any] = {}
            error: Optional[str] = None
            self._key = command.key
            try:
                # What was decided is done, however late: another rank may have done it in time.
                if at_fence is None and began > command.args.get("until_ns", began):
                    raise Refused("it arrived after its deadline")
                alone = at_fence is None and self._boundaries is not None
                if alone and command.verb in fences.FENCED:
                    ranks = self._position.world_size
                    raise Refused(f"{command.verb} on one of {ranks} ranks: it needs a fence")
                result = {**self._able(command.verb)(command.args), **(at_fence or {})}
            except Refused as problem:  # nothing was touched
                error, result = str(problem), {**problem.facts, "refused": True}
            except Exception as problem:
                error = describe_error(problem)
            step = self._position.step - 1
            self._mailbox.ack(command, step, error is None, result, error)
            if not self._paused_ns:
                self._position.held_ns += time.monotonic_ns() - began

    def _able(self, name: str) -> Verb:
        """Return who carries out a verb.

        Raises:
            Refused: nobody does here.
        """
        verb = self._verb(name)
        if verb is None:
            raise Refused(f"this probe knows no verb {name!r}")
        reason = self._out_of_reach() if name in fences.CHANGE_TRAINING else ""
        if reason:
            raise Refused(f"{name} is out of reach: {reason}")
        return verb

    def _verb(self, name: str, prefix: str = "do_") -> Optional[Verb]:
        """Whoever has a method `do_<verb>` carries it out: args -> what was observed."""
        methods = (getattr(part, prefix + name, None) for part in self._doers)
        return next(filter(None, methods), None)

    def _while_paused(self) -> None:
        self._reporter.beat("paused")
        self.fetch()
        self._handle_all()
        now, renewal_ns = time.monotonic_ns(), self._reporter.writer.lease_until_ns()
        if renewal_ns != self._renewal_ns:
            self._renewal_ns = renewal_ns
            longest_ns = now + int(self._lease_s * 1e9)
            self._until_ns = max(self._until_ns, min(renewal_ns, longest_ns))
        if self._paused_ns and now >= self._until_ns:
            self._end_pause("the pause was not renewed")
        if self._stopping and self._paused_ns:
            self._let_go()

    def _end_pause(self, reason: str) -> None:
        """Let the job go on without a resume, and report it."""
        held_s = self._let_go()
        step = self._position.step - 1
        self._reporter.notice(
            "pause-ended",
            f"{reason}: the job goes on by itself after {held_s:.0f} s",
            {"key": self._paused_by, "held_s": held_s, "paused_step": step},
        )

    def _let_go(self) -> float:
        held_ns = time.monotonic_ns() - self._paused_ns if self._paused_ns else 0
        self._paused_ns, self._reporter.held = 0, False
        self._position.held_ns += held_ns
        self._reporter.beat("step")
        self._reporter.status_changed()
        return held_ns / 1e9

    # ── fences ────────────────────────────────────────────────────────────────────────────────

    def do_fence(self, args: dict[str, Any]) -> dict[str, Any]:
        """Promise not to pass the boundary of step `step` without a verdict.

        Args:
            args: `id`, `step`, `wait_s`; `key`, `verb` and `args` of the command.

        Returns:
            `step`; `at`, the boundary that the rank is at; `boundaries`, see `Boundaries.newest`;
            for a verb that has a method `can_<verb>`, what that returns.

        Raises:
            Refused: the rank will not promise; it has vetoed, so that nobody waits for it.
        """
        order = Fence(
            str(args["id"]),
            int(args["step"]),
            str(args["key"]),
            str(args["verb"]),
            dict(args["args"]),
            min(float(args["wait_s"]), MOST_WAIT_S),
        )
        step = self._position.step - 1
        try:
            self._able(order.verb)
            if self._boundaries is None:
                raise Refused("the job has one rank")
            if self._fence is not None and not self._is_aborted(self._fence):
                raise Refused(f"it has promised to wait at step {self._fence.step}", busy=True)
            if step > order.step:
                raise Refused(f"it is behind step {order.step}, at {step}", past=step - order.step)
            can = self._verb(order.verb, "can_")
            facts = {} if can is None else can(order.args)
        except Exception as problem:
            reason = f"rank {self._position.rank} refuses {order.verb}: {problem}"
            facts = getattr(problem, "facts", {})
            path = fences.verdict_path(self._shm, order.id)
            fences.decide_fence(
                path, fences.ABORT, reason, order.step, facts
            )  # also why to try again
            raise
        self._fence = order
        promised = {"step": order.step, "at": step, "boundaries": self._boundaries.newest()}
        return {**promised, **facts}

    def _is_aborted(self, promised: Fence) -> bool:
        """Return whether a promise binds no more: in long steps its own boundary is far away."""
        verdict = fences.read_verdict(fences.verdict_path(self._shm, promised.id))
        return verdict is not None and verdict.decision == fences.ABORT

    def close(self) -> None:
        """Promise nothing any more: another training, or the end, takes the place of this one."""
        fence, self._fence = self._fence, None
        if fence is not None:
            reason = f"rank {self._position.rank} left its training before step {fence.step}"
            path = fences.verdict_path(self._shm, fence.id)
            try:  # whatever the guard thinks of us: a promise was given
                verdict = fences.decide_fence(path, fences.ABORT, reason, fence.step)
                if verdict.decision == fences.COMMIT:  # the others do it: this rank says it did not
                    command = Command(0, fence.key, fence.verb, {**fence.args, **verdict.args})
                    self._mailbox.ack(command, self._position.step - 1, False, {}, reason)
            except (OSError, ValueError, KeyError) as error:
                self._guard.failed(self._part, error)

    def do_outcome(self, args: dict[str, Any]) -> dict[str, Any]:
        """Answer once more to the command of a fence, for a supervisor that came later."""
        return {"known": self._mailbox.resend_answer(str(args["key"]))}

    def _meet_fence(self) -> None:
        """Wait for the verdict where it was promised, and carry it out."""
        order, step, rank = self._fence, self._position.step - 1, self._position.rank
        if order is None or step < order.step:
            return
        began, self._fence = time.monotonic_ns(), None
        path = fences.verdict_path(self._shm, order.id)
        verdict: Optional[fences.Verdict] = None
        reason = f"rank {rank} had no verdict at step {step} for {order.wait_s:g} s"
        if step > order.step:
            reason = f"rank {rank} passed step {order.step}"
        try:
            while self._part.on and step == order.step and elapsed_s(began) < order.wait_s:
                verdict = self._guard.run_while_waiting(self._part, fences.read_verdict, path)
                if verdict is not None:
                    break
                time.sleep(VERDICT_POLL_S)
        except BaseException as error:  # of a signal handler
            reason = f"rank {rank} was interrupted at step {step} by {describe_error(error)}"
            raise
        finally:
            wait_ms = elapsed_s(began) * 1e3
            if not self._paused_ns:
                self._position.held_ns += int(wait_ms * 1e6)
            try:  # whatever the guard thinks of us: a promise was given
                verdict = verdict or fences.decide_fence(path, fences.ABORT, reason, order.step)
                if verdict.decision == fences.COMMIT:
                    self._obey(order, verdict, reason, wait_ms)
            except (OSError, ValueError, KeyError) as error:
                self._guard.failed(self._part, error)

    def _obey(self, order: Fence, verdict: fences.Verdict, reason: str, wait_ms: float) -> None:
        command = Command(0, order.key, order.verb, {**order.args, **verdict.args})
        step = self._position.step - 1
        if step > order.step:  # the others have done it by now
            self._mailbox.ack(command, step, False, {}, reason)
        else:
            self._handle([command], {"wait_ms": round(wait_ms, 3)})

    # ── verbs ─────────────────────────────────────────────────────────────────────────────────

    def do_pause(self, args: dict[str, Any]) -> dict[str, Any]:
        now = time.monotonic_ns()
        lease_s = min(float(args.get("lease_s", self._lease_s)), self._lease_s)
        self._until_ns = now + int(lease_s * 1e9)
        self._renewal_ns = self._reporter.writer.lease_until_ns()  # of a pause before this one
        self._paused_by = self._key
        self._paused_ns, self._reporter.held = self._paused_ns or now, True
        self._reporter.beat("paused")
        self._reporter.status_changed()
        return {"paused_step": self._position.step - 1}

    def do_resume(self, args: dict[str, Any]) -> dict[str, Any]:
        return {"resumed": True, "held_s": self._let_go()}

    def do_lr_scale(self, args: dict[str, Any]) -> dict[str, Any]:
        value, steps = float(args["value"]), int(args.get("rewarm_steps", 0))
        if not 0.0 <= value <= 100.0 or steps < 0:
            raise Refused(f"lr_scale of {value} over {steps} steps: 0 to 100, and no negative step")
        rate, optimizers = self._rate, self._optimizers.living()
        rate_before = _rate_of(optimizers[0]) if optimizers else None
        if rate_before is not None:
            rate_before *= rate.factor()
        try:
            rate.start_scale(value, steps, self._position.step)
            if value == 1.0 and rate.hold is not None:
                rate.clear_hold()
        except OSError as error:
            self._reporter.notice("note", f"a relaunch will not know this learning rate: {error}")
        # A re-warm is another matter: it goes on, and the rate used is the product of both.
        ramp = {"lr_rewarm": rate.warming.now} if rate.warming.moves else {}
        return {"lr_scale": rate.held.now, **ramp, "learning_rate_before": rate_before}

    def do_hold_rate(self, args: dict[str, Any]) -> dict[str, Any]:
        if args.get("lift"):
            self._rate.clear_hold()
            return {"groups": 0}
        infos = [info for info in self._optimizers.known.values() if info.reference() is not None]
        before_step, release = int(args["before_step"]), int(args["release"])
        if "limit" in args:
            levels = self._rate.hold_at_limit(infos, before_step, float(args["limit"]), release)
        else:
            levels = self._rate.hold_at_healthy_level(
                infos, before_step, float(args["within"]), release
            )
        if not levels:
            raise Refused(
                f"no parameter group has a rate from before step {before_step} that is known on "
                "the host: a tensor on a device is none"
            )
        try:
            self._rate.save_hold()
        except OSError as error:
            self._reporter.notice("note", f"a relaunch will not hold this learning rate: {error}")
        return {"rate_limit": levels.get(0), "groups": len(levels)}

    def do_snapshot(self, args: dict[str, Any]) -> dict[str, Any]:
        directory, rank = str(args["directory"]), self._position.rank
        return {"files": evidence.write_evidence(directory, rank, self._torch, self._batches())}

    def do_stop(self, args: dict[str, Any]) -> dict[str, Any]:
        manner = args.get("how", "interrupt")
        if manner != "interrupt":
            raise Refused(f"stop knows only how=interrupt, not {manner!r}")
        self._stopping = True
        return {"stopping_step": self._position.step - 1}


def _rate_of(optimizer: Any) -> Optional[float]:
    rate = optimizer.param_groups[0].get("lr")
    if rate is None or (hasattr(rate, "device") and rate.device.type != "cpu"):
        return None
    return float(rate)


KEPT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # what the supervisor may hold


class KeptSignals:
    """The handlers of this process, once `install` was called."""

    def __init__(self, context: ProbeContext) -> None:
        self._reporter, self._position = context.reporter, context.position
        self._pid = 0

    def install(self) -> None:
        """Take the signals that nobody has taken; of one rank alone."""
        alone = self._position.world_size == 1 and self._pid != os.getpid()
        if not alone or threading.current_thread() is not threading.main_thread():
            return
        self._pid = os.getpid()
        for signum in KEPT:
            if signal.getsignal(signum) == signal.SIG_DFL:
                signal.signal(signum, self._on_signal)
                signal.siginterrupt(signum, False)  # C code of the job may not know of EINTR
        os.register_at_fork(after_in_child=self._restore)
        self._reporter.status_changed()

    def names(self) -> list[str]:
        """Return the signals whose handler is ours, and not the job's, now."""
        return [signal.Signals(signum).name for signum in self._own_signals()]

    def _own_signals(self) -> list[int]:
        # A bound method is made anew each time it is read: equal, not the same.
        return [
            number for number in KEPT if self._pid and signal.getsignal(number) == self._on_signal
        ]

    def _on_signal(self, signum: int, _frame: Any) -> None:
        writer = self._reporter.writer
        ours = os.getpid() == self._pid and writer is not None
        if ours and monotonic_ns() < writer.signals_deferred_until_ns():
            name = signal.Signals(signum).name
            text = f"{name} came to the job itself, and waits with that of the supervisor"
            self._reporter.notice("signal-kept", text, {"signal": name})
            return
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    def _restore(self) -> None:
        for signum in self._own_signals():
            signal.signal(signum, signal.SIG_DFL)
