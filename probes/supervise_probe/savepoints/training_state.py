"""The training state of one savepoint: parameters, buffers, optimizer state, gradient scalers.

Rule 1: everything is written back in place; no existing object of the job is replaced.
Rule 2: `raise_unless_restorable` refuses whatever can be refused, before the first byte is written.

What the loop drives stays as it is: options of parameter groups, schedulers, counters, the position
in the data, random state. Gradients become zero.
"""

from __future__ import annotations

import weakref
from collections import deque
from ctypes import string_at
from functools import partial
from itertools import chain, islice
from time import thread_time_ns
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional

from ..runtime.call_stack import CannotRestore
from ..torch_state.registry import Registry
from ..torch_state.tensor_copies import (
    TensorCopies,
    has_readable_memory,
    is_copyable,
    is_plain,
    local_part,
)

if TYPE_CHECKING:
    from ..runtime.scalars import Scalars
    from ..torch_state.records import Optimizers

_PLAIN = (int, float, complex, bool, str, bytes, type(None))
STATE_DEPTH = 8  # containers in containers; an optimizer's state has one or two
_OF_THE_STEP = ("_per_optimizer_states",)  # of a GradScaler: about the step under way
_MISSED = 50  # names
_FREED = "has no memory between two steps: the job moves it elsewhere, as offload does"


class SwappedOut(CannotRestore):
    """Weights or optimizer state have no memory now; they may have it back at the next step."""


ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()


class TrainingState:
    """The registered objects at the time of the savepoint."""

    def __init__(
        self,
        torch: ModuleType,
        registry: Registry,
        copies: TensorCopies,
        died: Callable[[Any], None],
    ) -> None:
        """Plan the copies; `died` is called when an optimizer is deleted.

        Raises:
            CannotRestore: a parameter is not plain memory, or an optimizer trains tensors that are
                no parameters of a module.
            SwappedOut: the memory of parameters or of optimizer state is freed.
        """
        self._torch, self._copies = torch, copies
        self.parameters: dict[int, SavedParameter] = {}  # by id
        self.modules = [self._module(module) for module in registry.modules]
        owned = frozenset(self.parameters)
        self.optimizers: list[SavedOptimizer] = []
        for optimizer in registry.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._add_parameter(parameter, f"a parameter of {type(optimizer).__name__}")
            plan = partial(self._restore_plan, owner=type(optimizer).__name__)
            self.optimizers.append(SavedOptimizer(optimizer, plan, died))
        self.scalers: list[tuple[Any, dict[str, Any]]] = [
            (weakref.ref(scaler), self._attributes(scaler)) for scaler in registry.scalers
        ]
        self._require_own_parameters(owned)

    def _module(self, module: Any) -> "SavedModule":
        name = type(module).__name__
        numbers = {
            key: self._add_parameter(parameter, f"{name}.{key}")
            for key, parameter in module._parameters.items()
            if parameter is not None and not parameter.is_meta
        }
        buffers = {key: self._restore_plan(value) for key, value in module._buffers.items()}
        return SavedModule(weakref.ref(module), numbers, buffers)

    def _attributes(self, scaler: Any) -> dict[str, Any]:
        attributes = vars(scaler).items()
        return {
            name: self._restore_plan(value)
            for name, value in attributes
            if name not in _OF_THE_STEP
        }

    def _add_parameter(self, parameter: Any, name: str) -> int:
        if not is_copyable(self._torch, parameter):
            if is_plain(self._torch, parameter):
                raise SwappedOut(f"{name} {_FREED}")
            raise CannotRestore(
                f"{name} is a {type(parameter).__name__} on {parameter.device}, laid out as "
                f"{parameter.layout}; only dense tensors on CPU or CUDA can be saved"
            )
        number = self._copies.add(parameter)
        self.parameters.setdefault(id(parameter), SavedParameter(name, number))
        return number

    def _restore_plan(self, value: Any, depth: int = 0, owner: str = "") -> Any:
        """Return how a value is restored: itself, where it is plain.

        Raises:
            SwappedOut: memory is freed in the state of the optimizer `owner`. Without moments it
                is no savepoint: a rollback would put old weights beside new ones.
        """
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, self._torch.Tensor):
            if is_copyable(self._torch, value):
                return SavedTensor(self._copies.add(value))
            if owner and is_plain(self._torch, value):
                raise SwappedOut(f"state of {owner} {_FREED}")
        elif depth < STATE_DEPTH and type(value) in (list, tuple):
            return SavedSequence(
                type(value), [self._restore_plan(part, depth + 1, owner) for part in value]
            )
        elif depth < STATE_DEPTH and isinstance(value, dict):
            items = dict.items(value)
            return SavedDict({k: self._restore_plan(v, depth + 1, owner) for k, v in items})
        return LEFT_ALONE

    def _require_own_parameters(self, owned: "frozenset[int]") -> None:
        """Raise CannotRestore unless what the optimizers train are the model's own parameters.

        Mixed-precision libraries (apex, DeepSpeed, Megatron) train copies and write them over the
        weights after each step: they would undo a rollback that does not know them.
        """
        for optimizer in self.optimizers:
            if any(not owned.issuperset(group) for group in optimizer.members):
                raise CannotRestore(
                    f"{optimizer.name} trains tensors that are no parameters of a module: copies "
                    "of the weights may be kept elsewhere, and a rollback would miss them"
                )

    def is_alive(self) -> bool:
        """Whether all optimizers, and the parameters they train, still exist."""
        return all(optimizer.reference() is not None for optimizer in self.optimizers)

    def raise_unless_restorable(self) -> None:
        """Raise CannotRestore unless `restore` can write everything back."""
        copies = self._copies
        if copies.any_freed():
            raise CannotRestore(f"part of the training state {_FREED}")
        # Another parameter may have the id of one that was deleted.
        deleted = {
            key
            for key, entry in self.parameters.items()
            if copies.live_tensor(entry.number) is None
        }
        for optimizer in self.optimizers:
            optimizer.raise_unless_restorable(deleted)
        for module in self.modules:
            module.raise_unless_restorable(copies)
        for parameter in self.parameters.values():
            if copies.shape_changed(parameter.number):
                raise CannotRestore(
                    f"{parameter.name} changed its shape or type since the savepoint"
                )
        if copies.any_shape_changed():
            raise CannotRestore("optimizer state changed its shape or type since the savepoint")

    def restore(self) -> list[str]:
        """Write back what updates change; return the names of what could not be written."""
        back = Restoration(self._copies)
        self._copies.write()
        for entry in self.parameters.values():
            _zero_gradient(self._torch, self._copies.live_tensor(entry.number))
        for module in self.modules:
            module.restore(back)
        for optimizer in self.optimizers:
            optimizer.restore(back)
        for reference, attributes in self.scalers:
            scaler = reference()
            if scaler is not None:
                back.update(vars(scaler), attributes, f"{type(scaler).__name__}.")
        return back.missed


class SavedTensor:
    """A tensor whose content is in the copies."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class SavedDict:
    """A dict, by its items."""

    __slots__ = ("items",)

    def __init__(self, items: dict[Any, Any]) -> None:
        self.items = items


class SavedSequence:
    """A list or tuple, by its elements."""

    __slots__ = ("content", "kind")

    def __init__(self, kind: type, content: list[Any]) -> None:
        self.kind, self.content = kind, content


LEFT_ALONE: Any = type("LeftAlone", (), {"__repr__": lambda self: "LEFT_ALONE"})()


class Restoration:
    """One rollback: the copies, and the names of what keeps its present value."""

    def __init__(self, copies: TensorCopies) -> None:
        self.copies = copies
        self.missed: list[str] = []

    def update(self, live: dict[str, Any], content: dict[str, Any], prefix: str) -> None:
        """Write saved values into a namespace; what was added since stays."""
        for name, part in content.items():
            value = self.value(part, live.get(name, ABSENT), f"{prefix}{name}")
            if value is not ABSENT and live.get(name, ABSENT) is not value:
                live[name] = value

    def value(self, part: Any, live: Any, path: str) -> Any:
        """Return the value that belongs where `live` is now; ABSENT: nothing is known of it."""
        if isinstance(part, SavedTensor):
            return self.copies.restored_tensor(part.number)
        if part is LEFT_ALONE:
            if path not in self.missed and len(self.missed) < _MISSED:
                self.missed.append(path)
            return live
        if isinstance(part, SavedSequence):
            return self._sequence(part, live, path)
        return self._dict(part, live, path) if isinstance(part, SavedDict) else part

    def _dict(self, part: SavedDict, live: Any, path: str) -> Any:
        target = live if isinstance(live, dict) else {}
        for key in [key for key in target if key not in part.items]:
            dict.__delitem__(target, key)
        for key, entry in part.items.items():
            value = self.value(entry, target.get(key, ABSENT), f"{path}[{key!r}]")
            if value is not ABSENT and target.get(key, ABSENT) is not value:
                dict.__setitem__(target, key, value)
        return target

    def _sequence(self, part: SavedSequence, live: Any, path: str) -> Any:
        is_same_kind = type(live) is part.kind
        present = list(live) if is_same_kind else []
        present += [ABSENT] * (len(part.content) - len(present))
        content = [
            self.value(item, present[i], f"{path}[{i}]") for i, item in enumerate(part.content)
        ]
        if any(value is ABSENT for value in content):
            return live
        if part.kind is list and type(live) is list:
            live[:] = content
            return live
        return part.kind(content)


class SavedParameter:
    """A parameter: its name for messages, and the number of its copy."""

    __slots__ = ("name", "number")

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number


class SavedModule:
    """One module: which parameter objects it has, and its buffers."""

    __slots__ = ("buffers", "numbers", "reference")

    def __init__(self, reference: Any, numbers: dict[str, int], buffers: dict[str, Any]) -> None:
        self.reference, self.numbers, self.buffers = reference, numbers, buffers

    def raise_unless_restorable(self, copies: TensorCopies) -> None:
        module = self.reference()
        if module is None:
            return
        for name, number in self.numbers.items():
            parameter = module._parameters.get(name)
            if parameter is None or parameter is not copies.live_tensor(number):
                path = f"{type(module).__name__}.{name}"
                raise CannotRestore(f"{path} was replaced since the savepoint")

    def restore(self, back: Restoration) -> None:
        module = self.reference()
        if module is not None:
            back.update(module._buffers, self.buffers, f"{type(module).__name__}.")


class SavedOptimizer:
    """One optimizer: the parameters that it trains, and its state for each."""

    __slots__ = ("members", "name", "reference", "state")

    def __init__(
        self, optimizer: Any, copy_value: Callable[[Any], Any], died: Callable[[Any], None]
    ) -> None:
        self.reference: Callable[[], Any] = weakref.ref(optimizer, died)
        self.name = type(optimizer).__name__
        self.members = [_ids(group) for group in optimizer.param_groups]
        self.state: list[tuple[Any, Any]] = [
            (weakref.ref(key) if hasattr(key, "grad_fn") else key, copy_value(value))
            for key, value in optimizer.state.items()
        ]

    def raise_unless_restorable(self, deleted: "set[int]") -> None:
        optimizer = self.reference()
        members = [_ids(group) for group in optimizer.param_groups]
        replaced = any(not deleted.isdisjoint(group) for group in self.members)
        if replaced or members[: len(self.members)] != self.members:
            raise CannotRestore(f"the parameters of {self.name} were replaced since the savepoint")

    def restore(self, back: Restoration) -> None:
        optimizer = self.reference()
        content = {}
        for key, part in self.state:
            key = key() if isinstance(key, weakref.ref) else key
            if key is not None:
                value = back.value(part, optimizer.state.get(key, ABSENT), f"{self.name}.state")
                if value is not ABSENT:
                    content[key] = value
        for key in [key for key in optimizer.state if key not in content]:
            del optimizer.state[key]
        optimizer.state.update(content)


def _zero_gradient(torch: Any, parameter: Optional[Any]) -> None:
    """Drop what is left of the last backward: in place, as a bucket may share its memory."""
    gradient = None if parameter is None else parameter.grad
    if gradient is None:
        return
    part = local_part(gradient)
    if gradient.is_sparse:
        parameter.grad = None  # type: ignore[union-attr]
    elif not is_plain(torch, part) or has_readable_memory(part):
        part.zero_()


def _ids(group: Any) -> tuple[int, ...]:
    return tuple(map(id, group["params"]))


BYTES = 256  # of a tensor that is looked at
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

    An update is made with moments that its optimizer left there. Where others are, something
    loaded, converted, emptied or damaged them, and the weights are still sound: no threshold says
    so, and it is known before the update, on every device. A job may mean it, so nothing is done
    for it alone. One that does it again and again is not watched any longer.

    Versions show writes through torch, of one parameter in each step, by turns: what befalls all of
    them is seen at once, what befalls one may not be. As often as `pace` allows a few of its bytes,
    where the host has them, show most other writes too. Read from memory, since one call of torch
    costs as much as all of this.

    Attributes:
        on: false once the job was seen to write the state itself.
        pace: a `Pace`: how often bytes are looked at.
    """

    def __init__(self, torch: Any, scalars: Scalars, optimizers: Optimizers, pace: Any) -> None:
        self.pace, self._spent_ns = pace, 0
        self._tensor, self._scalars, self._optimizers = torch.Tensor, scalars, optimizers
        self.on = True
        self._marks: list[Mark] = []
        self._turn = 0
        self._written: deque[int] = deque(maxlen=OFTEN)

    @property
    def has_marks(self) -> bool:
        """Whether the newest step left marks."""
        return bool(self._marks)

    def step_ended(self, elapsed_ns: Optional[int]) -> None:
        """All optimizers of a step have made their updates: mark what they left."""
        if self._spent_ns and elapsed_ns is not None:
            self.pace.adjust_interval(self._spent_ns, elapsed_ns)
        began = thread_time_ns() if self.pace.due else 0
        self._turn += 1
        marks = self._marks = []
        for info in self._optimizers.known.values():
            if (optimizer := info.reference()) is not None and optimizer.state:
                self._look(info.reference, optimizer.state, marks)
        self._spent_ns = thread_time_ns() - began if began else 0

    def forget(self) -> None:
        """The probe itself has written the state."""
        self._marks = []

    def changed_outside_optimizer(self, step: int) -> bool:
        """Whether the state is another one than after the last update; `step` is about to end."""
        began = thread_time_ns() if self._spent_ns else 0
        marks, self._marks = self._marks, []
        is_other = any(map(self._differs, marks))
        if began:
            self._spent_ns += thread_time_ns() - began
        if not is_other:
            return False
        self._written.append(step)
        self.on = len(self._written) < OFTEN or step - self._written[0] >= WITHIN
        return self.on

    def _look(self, reference: Any, state: Any, marks: list[Mark]) -> None:
        due, many, first = self.pace.due, len(marks), self._turn % len(state)
        for param in islice(chain(state, state), first, first + 2):
            values = state[param]
            for key, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, self._tensor) and value.numel() > 1:
                    sample = self._sample(value) if due else None
                    marks.append(Mark(reference, param, key, value._version, sample))
            if len(marks) > many:  # else it is of one value, as the counts of steps are
                return

    def _differs(self, mark: Mark) -> bool:
        optimizer = mark.optimizer()
        if optimizer is None:
            return False
        values = optimizer.state.get(mark.param)
        value: Any = None if values is None else values.get(mark.key)
        if value is None or value._version != mark.version:
            return True
        if mark.sample is None or (sample := self._sample(value)) is None:
            return False
        return mark.sample != sample

    def _sample(self, value: Any) -> Optional[bytes]:
        if type(value) is not self._tensor or not self._scalars.can_read_now(value):
            return None  # on a device, or of a class that holds its values elsewhere
        if not value.is_contiguous() or not has_readable_memory(value):
            return None
        return string_at(value.data_ptr(), min(BYTES, value.numel() * value.element_size()))


ENGINES = {"deepspeed": ("DeepSpeed", "DeepSpeedEngine")}  # by package: its name, and its class


class ForeignEngine:
    """Looks for one among the modules of the job: 0.1 us while none has come or gone."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._looked: tuple[int, str] = (-1, "")  # at this state of the registry: what was found

    def explain_refusal(self) -> str:
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
