"""Detection of writes to optimizer state by anything but the optimizer.

An update is made with moments that its optimizer left there. Where others are, something loaded,
converted, emptied or damaged them, and the weights are still sound: no threshold says so, and it is
known before the update, on every device. A job may mean it, so nothing is done for it alone. One
that does it again and again is not watched any longer.

Versions show writes through torch, and a few values, where the host has them, most others. A few
parameters are looked at in a step, by turns: what befalls all of them is seen at once, what befalls
one may not be.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Deque, List, NamedTuple, Optional, Tuple

if TYPE_CHECKING:
    from ..runtime.scalars import Scalars
    from .records import Optimizers
    from .registry import Registry

LOOK = 4  # parameters of an optimizer in a step; 10 us
VALUES = 64  # of the tensors of the first of them
OFTEN, WITHIN = 3, 64  # times in so many steps are a habit of the job; project defaults


class Mark(NamedTuple):
    """One tensor of the state as it was right after an update.

    Attributes:
        version: of the tensor. sample: its first values, where they are looked at.
    """

    param: Any
    key: str
    version: int
    sample: Optional[Any]


class StateWatch:
    """The marks of all optimizers.

    Attributes:
        on: false once the job was seen to write the state itself.
    """

    def __init__(self, torch: Any, scalars: Scalars, optimizers: Optimizers) -> None:
        self._torch, self._scalars, self._optimizers = torch, scalars, optimizers
        self.on = True
        self._marks: weakref.WeakKeyDictionary[Any, List[Mark]] = weakref.WeakKeyDictionary()
        self._turn = 0
        self._written: Deque[int] = deque(maxlen=OFTEN)

    def step_ended(self) -> None:
        """All optimizers of a step have made their updates: mark what they left."""
        self._turn += LOOK
        for optimizer in self._optimizers.living():
            self._marks[optimizer] = self._look(optimizer)

    def forget(self) -> None:
        """The probe itself has written the state."""
        self._marks.clear()

    def was_written(self, step: int) -> bool:
        """Whether the state is another one than after the last update; `step` is about to end."""
        if not any(self._differs(o, mark) for o, marks in self._marks.items() for mark in marks):
            return False
        self._written.append(step)
        self.on = len(self._written) < OFTEN or step - self._written[0] >= WITHIN
        return self.on

    def _look(self, optimizer: Any) -> List[Mark]:
        state, params = optimizer.state, list(optimizer.state)
        marks: List[Mark] = []
        for number in range(min(LOOK, len(params))):
            param = params[(self._turn + number) % len(params)]
            values = state[param]
            for key, value in values.items() if isinstance(values, dict) else ():
                if self._torch.is_tensor(value) and value.numel() > 1:
                    sample = None if number else self._sample(value)
                    marks.append(Mark(param, key, value._version, sample))
        return marks

    def _differs(self, optimizer: Any, mark: Mark) -> bool:
        values = optimizer.state.get(mark.param)
        value: Any = None if values is None else values.get(mark.key)
        if value is None or value._version != mark.version:
            return True
        return mark.sample is not None and not self._torch.equal(
            mark.sample, value.detach().view(-1)[:VALUES]
        )

    def _sample(self, value: Any) -> Optional[Any]:
        if not value.is_contiguous() or not self._scalars.reads(value):
            return None
        return value.detach().view(-1)[:VALUES].clone()


ENGINES = {"deepspeed": ("DeepSpeed", "DeepSpeedEngine")}  # by package: its name, and its class


class ForeignEngine:
    """Looks for one among the modules of the job: 0.1 us while none has come or gone."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._looked: Tuple[int, str] = (-1, "")  # at this state of the registry: what was found

    def why_not(self) -> str:
        """Return why nothing of the training can be changed or restored here, "" where it can."""
        modules = self._registry.modules
        if self._looked[0] != modules.changes:
            engine = next(filter(None, (_name_of(type(module)) for module in modules)), "")
            self._looked = modules.changes, engine
        name = self._looked[1]
        return name and f"{name} keeps weights and moments of its own, which no savepoint holds"


def _name_of(kind: type) -> str:
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        if package in ENGINES and base.__name__ == ENGINES[package][1]:
            return ENGINES[package][0]
    return ""
