"""Schedule of injected faults: each drill once per run, at its step, whatever is rolled back.

Knows no fault; the other files here do. A small mark in the run directory shows a relaunched job
that a drill is over.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Callable, Mapping, Optional, Sequence

from ..runtime import files
from . import CannotActError, Fault, complete_parameters, fault_classes

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..ipc.publisher import Publisher
    from ..torch_state.records import Optimizers

# fault, name, first step after it
Active = tuple[Fault, str, int]


class ScheduledFault:
    """One drill as the supervisor ordered it."""

    def __init__(self, order: Mapping[str, Any], index: int) -> None:
        self.name = str(order["fault"])
        self.step = int(order["step"])
        self.index = index
        self.rank = order.get("rank")  # None: every rank
        self.params = complete_parameters(self.name, order.get("params") or {})
        self.kind = fault_classes()[self.name]
        self.fault: Optional[Fault] = None

    def make(self, torch: Any) -> Fault:
        """Return the fault, which is made once."""
        self.fault = self.fault or self.kind(torch, self.params)
        return self.fault


class FaultInjector:
    """All drills of one rank; none before it is one.

    Attributes:
        active: whether any fault acts in this step.
        follows: whether `schedule_factor` is to be asked at each step of an optimizer.
    """

    def __init__(self, context: ProbeContext, optimizers: Optimizers) -> None:
        self._context, self._optimizers = context, optimizers
        self._guard = context.guard
        self._part = context.guard.part("drills", share=1.0)
        self._publisher: Optional[Publisher] = None
        self.active = self.follows = False
        self._waiting: list[ScheduledFault] = []
        self._active: list[Active] = []
        self._lacking: dict[tuple[Active, str], str] = {}  # what a call of a fault did not find
        self._called = True  # the outermost module was, while what is active acted

    def plan(self, orders: Sequence[Mapping[str, Any]], publisher: Publisher) -> None:
        """The process is a rank, with these orders; what acts already has its time."""
        self._publisher, self._waiting = publisher, []
        for index, order in enumerate(orders):
            # What is for a rank that does not exist, rank 0 refuses when its step comes.
            if order.get("rank") in (None, self._context.position.rank) or self._is_first():
                self._plan(order, index)
        self.begin_step(self._context.position.step)
        self._called = True  # the forward of a step that is under way was not seen

    def _is_first(self) -> bool:
        return self._context.position.rank == 0

    def _plan(self, order: Mapping[str, Any], index: int) -> None:
        try:
            drill = ScheduledFault(order, index)
            if drill.kind.FOLLOWS:
                drill.make(self._context.torch)
            self._waiting.append(drill)
        except (KeyError, TypeError, ValueError) as error:
            self._context.reporter.notice("drill", f"drill {order} cannot run: {error}")

    def begin_step(self, step: int) -> None:
        """Step `step` is about to begin."""
        if not self._waiting and not self._active:
            return
        if not self._called:
            self._lack_forward()
        if self._lacking:
            self._refuse_lacking()
        over = [entry for entry in self._active if step >= entry[2]]
        self._active = [entry for entry in self._active if step < entry[2]]
        self._end(over)
        for drill in [drill for drill in self._waiting if drill.step <= step]:
            self._waiting.remove(drill)
            if drill.rank not in (None, self._context.position.rank):
                if drill.rank >= self._context.position.world_size and self._first_time(drill):
                    ranks = self._context.position.world_size
                    self._refuse(drill.name, f"there is no rank {drill.rank} in {ranks}")
            elif self._first_time(drill):
                fault = drill.make(self._context.torch)
                self._active.append((fault, drill.name, step + fault.steps))
                params = ", ".join(f"{key}={value}" for key, value in drill.params.items())
                self._context.reporter.notice(
                    "drill",
                    f"drill {drill.name} begins at step {step} ({params or 'no parameters'})",
                    {"fault": drill.name, "params": drill.params, "steps": fault.steps},
                )
        self.active, self.follows = bool(self._active), bool(self._following())
        self._called = False
        if self._publisher is not None:
            self._publisher.muted = any(fault.silent for fault, _, _ in self._active)

    def _end(self, over: Sequence[Active]) -> None:
        for fault, name, _ in over:
            missed = self._guard.run(self._part, _ended, fault)
            if missed:
                self._refuse(name, missed)

    def names(self) -> list[str]:
        """Return what still acts or is to come, for the status."""
        coming = [
            f"{drill.name}@{drill.step}"
            for drill in self._waiting
            if drill.rank in (None, self._context.position.rank)
        ]
        return [f"{name} (active)" for _, name, _ in self._active] + coming

    def lr_factor(self) -> float:
        """Return the product over all active faults."""
        factor = 1.0
        for fault, _, _ in self._active:
            factor *= fault.lr_factor()
        return factor

    def schedule_factor(self, optimizer: Any, step: int) -> float:
        """Return the product for an optimizer that is about to step; those that wait look on."""
        for fault in self._following():
            self._guard.run(self._part, fault.follow, optimizer, step)
        factor = 1.0
        for entry in self._active:
            if entry[0].FOLLOWS:
                change = self._call(entry, entry[0].schedule_factor, optimizer, step)
                factor *= 1.0 if change is None else change
        return factor

    def _following(self) -> list[Fault]:
        waiting = [drill.fault for drill in self._waiting if drill.fault is not None]
        return waiting + [fault for fault, _, _ in self._active if fault.FOLLOWS]

    def forward(
        self, root: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that the outermost module shall get."""
        self._called = True
        for entry in self._active:
            changed = self._call(entry, entry[0].forward, root, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        return args, kwargs

    def output(self, result: Any) -> None:
        """The outermost module has returned `result`."""
        for entry in self._active:
            self._call(entry, entry[0].output, result)

    def evaluation(
        self, root: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments that the model shall get for an evaluation."""
        for entry in self._active:
            changed = self._call(entry, entry[0].evaluation, root, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        return args, kwargs

    def allows_clip(self) -> bool:
        """Return whether a clip that the job calls is made."""
        verdicts = [self._call(entry, entry[0].allows_clip) for entry in self._active]
        return False not in verdicts

    def before_update(self, params: list[Any], stepping: Optional[Any] = None) -> None:
        """The gradients of `params` are final, in the optimizer `stepping` if there is one."""
        optimizers = self._optimizers.living()
        if stepping is not None and stepping not in optimizers:
            optimizers = [*optimizers, stepping]
        for entry in self._active:
            self._call(entry, entry[0].before_update, params)
            self._call(entry, entry[0].before_step, optimizers)

    def after_backward(self) -> None:
        """A backward has run."""
        params = self._optimizers.parameters()
        for entry in self._active:
            self._call(entry, entry[0].after_backward, params)

    def block(self) -> None:
        """Inside the step, outside the guard."""
        for fault, _, _ in self._active:
            fault.block()

    def after_save(self, path: str) -> None:
        """The job has saved what looks like a checkpoint."""
        for entry in self._active:
            self._call(entry, entry[0].after_save, path)

    def _call(self, entry: Active, function: Callable[..., Any], *args: Any) -> Any:
        return self._guard.run(self._part, self._unless_refused, entry, function, args)

    def _unless_refused(
        self, entry: Active, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any:
        """Call a fault. What it lacks now, another model or optimizer of this step may have."""
        try:
            outcome = function(*args)
        except CannotActError as error:
            self._lacking[entry, function.__name__] = str(error)
            return None
        self._lacking.pop((entry, function.__name__), None)
        return outcome

    def _lack_forward(self) -> None:
        """A step is over, and no call of the outermost module was seen in it."""
        for entry in self._active:
            if type(entry[0]).forward is not Fault.forward:
                self._lacking[entry, "forward"] = "no call of the outermost module is seen"

    def _refuse_lacking(self) -> None:
        """A step is over: a fault that found nothing in it to act on is over, too."""
        lacking, self._lacking = self._lacking, {}
        for (entry, _), reason in lacking.items():
            if entry in self._active:
                self._active.remove(entry)
                self._end([entry])
                self._refuse(entry[1], reason)

    def _refuse(self, name: str, reason: str) -> None:
        self._context.reporter.notice(
            "drill", f"drill {name} is refused: {reason}", {"fault": name, "refused": reason}
        )

    def _first_time(self, drill: ScheduledFault) -> bool:
        mark = f"drilled.{drill.index}.{self._context.position.rank}"
        try:
            os.close(files.create_file(os.path.join(self._context.config.marks, mark)))
        except FileExistsError:
            return False
        except OSError:  # no mark can be left: this process still fires it only once
            pass
        return True


def _ended(fault: Fault) -> str:
    """End a fault; return what it waited for in vain."""
    try:
        fault.end()
    except CannotActError as error:
        return str(error)
    return ""
