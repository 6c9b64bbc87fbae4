"""Records of a step, which collectors are shown, and the host's time by activity.

Plain records; whoever fills them is in stepping/step_tracker.py, and for `Times` in hooks/.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from itertools import chain
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any, Callable, Mapping, Optional

if TYPE_CHECKING:
    from ..runtime.scalars import Number

_MEMBERS = itemgetter("params")
TRAIL_LENGTH = 128  # changes of the rates that are known of an optimizer; project default
Trail = deque[tuple[int, list[Optional[float]]]]  # (step, rates of its groups), at each change


class SkipUpdate(BaseException):
    """Leaves `optimizer.step(closure)` from inside the closure, before the update."""


class OptimizerInfo:
    """What stays the same of an optimizer from step to step.

    Attributes:
        params: all its parameters. ids: their ids.
        real: false where they hold no values, or where there are none.
        clipped_as: a list of parameters that is known to hold all of these.
        groups: how many parameter groups it has. first_group: flat number of the first of them.
        everyone: all that are counted through with it, itself among them.
        shared: ids of parameters that another one holds too.
        rates: the newest changes of its groups' learning rates, as the job asks for them.
    """

    def __init__(self, optimizer: Any) -> None:
        self.reference = weakref.ref(optimizer)
        self.first_group = self.groups = 0
        self.everyone: list[weakref.ref[OptimizerInfo]] = []
        self.params: list[Any] = []
        self.ids: frozenset[int] = frozenset()
        self.shared: frozenset[int] = frozenset()
        self.clipped_as: list[Any] = []
        self.rates: Trail = deque(maxlen=TRAIL_LENGTH)
        self.real = False
        self.refresh(optimizer)

    def refresh(self, optimizer: Any) -> bool:
        """Read all again if parameters or groups are others, or in another order; whether they are.

        A job may put another one into the list of a group, so every one is looked at, by C alone.
        """
        groups = optimizer.param_groups
        params = list(chain.from_iterable(map(_MEMBERS, groups)))
        if (
            len(params) == len(self.params)
            and len(groups) == self.groups
            and all(map(is_, params, self.params))
        ):
            return False
        self.groups = len(groups)
        self.params = self.clipped_as = params
        self.ids = frozenset(map(id, params))
        lead = params[0] if params else None
        self.real = not (lead is None or lead.is_meta or hasattr(lead, "fake_mode"))
        _count(self.everyone)
        return True


def order_optimizers(
    infos: dict[int, OptimizerInfo],
    key: int,
    new: OptimizerInfo,
    beside: list[int],
    earlier: int,
) -> dict[int, OptimizerInfo]:
    """Return those whose optimizers live and a `new` one, their groups counted through.

    They stand in order of first step, but for one that takes parameters over: it stands in front
    of whoever had them, and mostly steps no more.

    Args:
        beside: keys of those that it steps together with.
        earlier: how many of these stepped before it, if it is of a training before.
    """
    living: dict[int, OptimizerInfo] = {}
    for number, info in infos.items():
        if number == key or info.reference() is None:
            continue
        if number not in beside and not new.ids.isdisjoint(info.ids):
            living.setdefault(key, new)
        living[number] = info
    if key not in living:
        ordered = list(living.items())
        living = dict([*ordered[:earlier], (key, new), *ordered[earlier:]])
    everyone = list(map(weakref.ref, living.values()))  # a cycle would keep weights alive
    for info in living.values():
        info.everyone = everyone
    _count(everyone)
    return living


def _count(everyone: list[weakref.ref[OptimizerInfo]]) -> None:
    """Number the groups flat over the optimizers, and see what several of these hold."""
    living = [info for reference in everyone if (info := reference()) is not None]
    number, times = 0, Counter(chain.from_iterable(info.ids for info in living))
    several = frozenset(key for key, count in times.items() if count > 1)
    for info in living:
        info.first_group, info.shared = number, info.ids & several
        number += info.groups


class Optimizers:
    """The optimizers of one process that have stepped, in order of first step.

    Attributes:
        known: what stays the same of each, by its id. Some may be gone.
    """

    def __init__(self) -> None:
        self.known: dict[int, OptimizerInfo] = {}

    def leader(self) -> int:
        """Return the id of the first, 0 before there is one."""
        return next(iter(self.known), 0)

    def living(self) -> list[Any]:
        """Return those that the job still holds."""
        return [o for info in self.known.values() if (o := info.reference()) is not None]

    def parameters(self) -> list[Any]:
        """Return all parameters of the living ones, one in two of them twice."""
        return [p for o in self.living() for group in o.param_groups for p in group["params"]]


class Update:
    """One optimizer's part of a step.

    Attributes:
        known: what stays the same of the optimizer.
        params: its parameters that have a gradient; `all_params` has the others too.
        scaler: the GradScaler that runs this step, else None; `scale` is its loss scale.
        found_inf: above 0 when a fused optimizer will mask its update, for overflow.
        scheduled: the rate of its first group before the probe scaled it.
        gradient_norm: of `params`, unscaled; None when it was not measured.
        skip: why the update is not applied, "" when it is.
        closure: whether gradients come from a closure inside the step.
        measured: whether the gradients have been looked at.
    """

    __slots__ = (
        "closure",
        "found_inf",
        "gradient_norm",
        "known",
        "measured",
        "optimizer",
        "result",
        "scale",
        "scaler",
        "scheduled",
        "skip",
    )

    def __init__(self, optimizer: Any, closure: bool, info: OptimizerInfo) -> None:
        self.optimizer = optimizer
        self.closure = closure
        self.known = info
        self.scaler: Any = None
        self.scale: Number = 1.0
        self.found_inf: Optional[Number] = None
        self.scheduled: Any = None
        self.gradient_norm: Optional[Number] = None
        self.skip = ""
        self.measured = False
        self.result: Any = None

    @property
    def all_params(self) -> list[Any]:
        return self.known.params

    @property
    def params(self) -> list[Any]:
        return [p for p in self.known.params if p.grad is not None]


class Step:
    """A step that is over. `elapsed_ns` is None for the first of a process."""

    __slots__ = ("at_ns", "attempt", "elapsed_ns", "number")

    def __init__(self, number: int, attempt: int, at_ns: int, elapsed_ns: Optional[int]) -> None:
        self.number = number
        self.attempt = attempt
        self.at_ns = at_ns
        self.elapsed_ns = elapsed_ns


def learning_rate_of(torch: Any, optimizer: Any) -> Any:
    """Return the rate of its first group as it is now, None where it has none."""
    rate = optimizer.param_groups[0].get("lr")
    if type(rate) is not float and isinstance(rate, torch.Tensor):
        return rate.clone()
    return rate


def is_state_creating_step(torch: Any, update: Update, backward: bool) -> bool:
    """Whether the job only pretends to step: rate 0 and gradients 0, to create its state.

    Args:
        backward: whether one has run since the last step.
    """
    for group in update.optimizer.param_groups:
        rate = group.get("lr")
        if type(rate) is not float and isinstance(rate, torch.Tensor):
            if rate.device.type != "cpu":
                return False
            rate = rate.item()
        if rate != 0:
            return False
    if update.closure:
        return False
    grads = [p.grad for p in update.all_params if p.grad is not None]
    if any(g.device.type != "cpu" for g in grads):
        return not backward
    return not any(bool((g != 0).any()) for g in grads)


class SafeguardState:
    """Written by the safeguards; read by the step tracker and the collector `limits`.

    Attributes:
        acting: whether any safeguard may have something to do around a step. Whoever puts something
            in force sets it; it is taken back at the end of a step when all of them are idle.
        clip_bound: what the gradient norm is limited to; None: nothing is limited.
        zeroed: whether `zero_nonfinite` fired in this step; None where it is not armed.
        clipped: whether an update of this step was shortened; None where none was judged.
        outlier: whether `skip_outliers` skipped this step's update; None where it is not ordered.
        guards: by name, whether what the policy orders against outliers is in place.
    """

    __slots__ = ("acting", "clip_bound", "clipped", "guards", "outlier", "zeroed")

    def __init__(self) -> None:
        self.acting = True
        self.clip_bound: Optional[float] = None
        self.zeroed: Optional[Number] = None
        self.clipped: Optional[Number] = None
        self.outlier: Optional[float] = None
        self.guards: dict[str, bool] = {}


class Average:
    """Exponential moving average without the bias of its start: m_t / (1 - decay^t).

    Args:
        name: of its numbers in a state.
        decay: weight of the past, such as 0.99.

    Attributes:
        value: the average; None before the first value.
    """

    __slots__ = ("_decay", "_keys", "_new", "_sum", "_weight", "value")

    def __init__(self, name: str, decay: float) -> None:
        self._decay = decay
        self._new = 1.0 - decay
        self._sum = self._weight = 0.0
        self._keys = name + ".sum", name + ".weight"
        self.value: Optional[float] = None

    def add(self, value: float) -> None:
        """Take one more value, which must be finite."""
        total = self._sum = self._decay * self._sum + self._new * value
        weight = self._weight = self._decay * self._weight + self._new
        self.value = total / weight

    def save_state(self, state: dict[str, float]) -> None:
        """Add its numbers to `state`."""
        total, weight = self._keys
        state[total], state[weight] = self._sum, self._weight

    def load_state(self, state: Mapping[str, float]) -> None:
        """Put back what `save` wrote."""
        total, weight = self._keys
        self._sum, self._weight = state.get(total, self._sum), state.get(weight, self._weight)
        self.value = self._sum / self._weight if self._weight else None


class StepShareWindow:
    """Share of the last `size` steps in which something happened; of all steps while fewer.

    Attributes:
        percent: the share; 0 before the first step.
    """

    __slots__ = ("_bits", "_count", "_hits", "_keys", "_mask", "_size", "percent")

    def __init__(self, name: str, size: int) -> None:
        self._size, self._mask = size, (1 << size) - 1
        self._bits = self._count = self._hits = 0
        self._keys = name + ".bits", name + ".count"
        self.percent = 0.0

    def add_step(self, happened: bool) -> None:
        """One more step."""
        bits = self._bits
        if self._count < self._size:
            self._count += 1
        if not bits and not happened:
            return
        bits = bits << 1 | happened
        self._hits += happened - (bits >> self._size)
        self._bits = bits & self._mask
        self.percent = 100.0 * self._hits / self._count

    def save_state(self, state: dict[str, float]) -> None:
        """Add its numbers to `state`: a whole number of `size` bits, and how many of them count."""
        bits, count = self._keys
        state[bits], state[count] = self._bits, self._count

    def load_state(self, state: Mapping[str, float]) -> None:
        """Put back what `save` wrote."""
        bits, count = self._keys
        self._bits, self._count = int(state.get(bits, 0)), int(state.get(count, 0))
        self._hits = bin(self._bits).count("1")
        self.percent = 100.0 * self._hits / self._count if self._hits else 0.0


class Times:
    """Running sums in ns. A part that is 0 never was in any step.

    Attributes:
        input, forward, backward, optimizer, comm: since the process began.
        ended: all five when the newest optimizer's step ended.
        collectives: how many were called. show: takes that, an index into `wire.COLLECTIVES` and
            whether it runs; None while the process is no rank.
    """

    __slots__ = (
        "backward",
        "collectives",
        "comm",
        "ended",
        "forward",
        "input",
        "optimizer",
        "show",
    )

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin at nothing: this is another process."""
        self.input = self.forward = self.backward = self.optimizer = self.comm = 0
        self.ended = 0, 0, 0, 0, 0
        self.collectives = 0
        self.show: Optional[Callable[[int, int, bool], None]] = None

    def enters(self, index: int) -> None:
        """A collective begins; it may never return."""
        self.collectives += 1
        if self.show is not None:
            self.show(self.collectives, index, True)

    def leaves(self, index: int) -> None:
        """It returned, or raised."""
        if self.show is not None:
            self.show(self.collectives, index, False)

    def add_collective_wait(self, elapsed_ns: int, part: str) -> None:
        """`elapsed_ns` passed in a collective, inside `part`, which has not ended ("": in none)."""
        self.comm += elapsed_ns
        if part:
            setattr(self, part, getattr(self, part) - elapsed_ns)

    def inside(self) -> int:
        """Return what was counted so far in the parts that can run inside an optimizer's step."""
        return self.input + self.forward + self.backward + self.comm

    def end(self) -> None:
        """An optimizer's step ended."""
        self.ended = self.input, self.forward, self.backward, self.optimizer, self.comm

    def had_forward_since_step(self) -> bool:
        """Whether the outermost module was called since the newest optimizer's step."""
        return self.forward != self.ended[1]


class Position:
    """Written by the wiring (rank) and by the step tracker; read by nearly every part.

    Attributes:
        rank, world_size: as the process group or the launcher says.
        step: number of the one under way.
        attempt: counts launches and rollbacks of the run.
        held_ns: since the last step ended, the time in which the probe held the job: it is no part
            of a step's time.
    """

    __slots__ = ("attempt", "held_ns", "rank", "step", "world_size")

    def __init__(self, step: int, attempt: int) -> None:
        self.rank, self.world_size = 0, 1
        self.step, self.attempt = step, attempt
        self.held_ns = 0
