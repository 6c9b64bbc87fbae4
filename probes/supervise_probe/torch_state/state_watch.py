"""Detection of writes to optimizer state by anything but the optimizer.

An update is made with moments that its optimizer left there. Where others are, something loaded,
converted, emptied or damaged them, and the weights are still sound: no threshold says so, and it is
known before the update, on every device. A job may mean it, so nothing is done for it alone. One
that does it again and again is not watched any longer.

Versions show writes through torch, and a few bytes, where the host has them, most others. Two
parameters are looked at in a step, by turns: what befalls all of them is seen at once, what befalls
one may not be. Read from memory, since one call of torch costs as much as all of this.
"""

from __future__ import annotations

from collections import deque
from ctypes import string_at
from time import thread_time_ns
from typing import TYPE_CHECKING, Any, Callable, Deque, List, NamedTuple, Optional, Tuple

if TYPE_CHECKING:
    from ..runtime.scalars import Scalars
    from .records import Optimizers
    from .registry import Registry

LOOK = 2  # parameters of an optimizer in a step
BYTES = 256  # of the tensors of the first of them
OFTEN, WITHIN = 3, 64  # times in so many steps are a habit of the job; project defaults


class Mark(NamedTuple):
    """One tensor of the state as it was right after an update.

    Attributes:
        optimizer: returns it, None once it is gone.
        version: of the tensor. sample: its first bytes, where they are looked at.
    """

    optimizer: Callable[[], Any]
    param: Any
    key: str
    version: int
    sample: Optional[bytes]


class StateWatch:
    """The marks of all optimizers.

    Attributes:
        on: false once the job was seen to write the state itself.
        pace: a `Pace`: how often.
    """

    def __init__(self, torch: Any, scalars: Scalars, optimizers: Optimizers, pace: Any) -> None:
        self.pace, self._spent_ns = pace, 0
        self._tensor, self._scalars, self._optimizers = torch.Tensor, scalars, optimizers
        self.on = True
        self._marks: List[Mark] = []
        self._turn = 0
        self._written: Deque[int] = deque(maxlen=OFTEN)

    @property
    def marked(self) -> bool:
        """Whether the newest step left marks."""
        return bool(self._marks)

    def step_ended(self, elapsed_ns: Optional[int]) -> None:
        """All optimizers of a step have made their updates: mark what they left."""
        began = thread_time_ns()
        if self._spent_ns and elapsed_ns is not None:
            self.pace.weigh(self._spent_ns, elapsed_ns)
        self._turn += LOOK
        marks = self._marks = []
        for info in self._optimizers.known.values():
            if (optimizer := info.reference()) is not None:
                self._look(info.reference, optimizer.state, marks)
        self._spent_ns = thread_time_ns() - began

    def forget(self) -> None:
        """The probe itself has written the state."""
        self._marks = []

    def was_written(self, step: int) -> bool:
        """Whether the state is another one than after the last update; `step` is about to end."""
        began, marks, self._marks = thread_time_ns(), self._marks, []
        is_other = any(map(self._differs, marks))
        self._spent_ns += thread_time_ns() - began
        if not is_other:
            return False
        self._written.append(step)
        self.on = len(self._written) < OFTEN or step - self._written[0] >= WITHIN
        return self.on

    def _look(self, reference: Any, state: Any, marks: List[Mark]) -> None:
        params = list(state)
        for number in range(min(LOOK, len(params))):
            param = params[(self._turn + number) % len(params)]
            values = state[param]
            for key, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, self._tensor) and value.numel() > 1:
                    sample = None if number else self._sample(value)
                    marks.append(Mark(reference, param, key, value._version, sample))

    def _differs(self, mark: Mark) -> bool:
        optimizer = mark.optimizer()
        if optimizer is None:
            return False
        values = optimizer.state.get(mark.param)
        value: Any = None if values is None else values.get(mark.key)
        if value is None or value._version != mark.version:
            return True
        return mark.sample is not None and mark.sample != self._sample(value)

    def _sample(self, value: Any) -> Optional[bytes]:
        if type(value) is not self._tensor or not self._scalars.reads(value):
            return None  # on a device, or of a class that holds its values elsewhere
        if not value.is_contiguous():
            return None
        return string_at(value.data_ptr(), min(BYTES, value.numel() * value.element_size()))


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
