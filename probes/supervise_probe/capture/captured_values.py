"""The saved values of the job's plain variables, and how each kind is restored.

Rule 1: objects of the job are referenced weakly or by id, never held.
Rule 2: objects are changed in place, so that every other name for them agrees.
Rule 3: what cannot be restored keeps its present value and is named in `Restoration.missed`.

`variable_walk.py` makes these from live values; containers are in `containers.py`. Every
`restore(live, back, path)` gets the present value (`ABSENT` if none) and returns the one that
belongs there (`ABSENT` when it cannot be restored).
"""

from types import FunctionType, MethodType
from typing import Any, Callable, Dict, List, Mapping, Optional

from ..runtime import rng
from ..runtime.object_access import attributes, closure, find, set_attribute, weak
from .tensor_copies import TensorCopies

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()
_MISSED_MAX = 50  # names


class Restoration:
    """One rollback: the copies, what is restored already, what could not be.

    Args:
        keep_data: do not restore random generators, nor batches drawn since.
        is_code: whether a value is a function, class or module, which hold no state by name.
    """

    def __init__(
        self,
        copies: TensorCopies,
        keep_data: bool,
        is_constant: Callable[[Any], bool],
        is_code: Callable[[Any], bool],
    ) -> None:
        self.copies = copies
        self.keep_data = keep_data
        self.is_constant = is_constant
        self.is_code = is_code
        self.done: Dict[int, Any] = {}  # by id of the saved value: its restored value
        self.missed: List[str] = []

    def miss(self, path: str) -> None:
        """Note that the variable `path` keeps its present value."""
        if path not in self.missed and len(self.missed) < _MISSED_MAX:
            self.missed.append(path)


def type_name(value: Any) -> str:
    """The name of a class or function, or that of a value's class."""
    named = value if isinstance(value, (type, FunctionType)) else type(value)
    return str(named.__qualname__)


class Value:
    """A saved value."""

    __slots__ = ()

    def restore(self, live: Any, back: Restoration, path: str) -> Any:
        """Restore the value at the place that holds `live` now; return what belongs there."""
        raise NotImplementedError


class Fields:
    """Named values: the variables of a frame, the attributes of an object, the items of a dict."""

    __slots__ = ("constants", "special")

    def __init__(self) -> None:
        self.constants: Dict[Any, Any] = {}  # immutable values, kept as they are
        self.special: Dict[Any, Value] = {}

    def __contains__(self, key: Any) -> bool:
        return key in self.constants or key in self.special

    def content(
        self, live: Mapping[Any, Any], back: Restoration, path: Callable[[Any], str]
    ) -> Dict[Any, Any]:
        """Return the restored values by name; those that cannot be restored are noted as missed."""
        content = dict(self.constants)
        for key, part in self.special.items():
            value = part.restore(live.get(key, ABSENT), back, path(key))
            if value is ABSENT:
                back.miss(path(key))
            else:
                content[key] = value
        return content

    def restore(self, live: Dict[Any, Any], back: Restoration, prefix: str = "") -> None:
        """Restore a namespace; constants that were added since are removed."""
        for key, value in self.content(live, back, lambda key: f"{prefix}{key}").items():
            if live.get(key, ABSENT) is not value:
                live[key] = value
        for key in self.added(live, back, prefix):
            del live[key]

    def added(self, live: Mapping[Any, Any], back: Restoration, prefix: str = "") -> List[Any]:
        """Return the constants that were added since; other new data is noted as missed."""
        constants = []
        for key in list(live):
            if key in self or str(key).startswith("__"):
                continue
            if back.is_constant(live[key]):
                constants.append(key)
            elif not back.is_code(live[key]):
                back.miss(f"{prefix}{key}")
        return constants


class Tensor(Value):
    """A tensor, or a numpy array over the same memory, with its content."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def restore(self, live: Any, back: Restoration, path: str) -> Any:
        copies = back.copies
        if back.keep_data and live is not copies.original(self.number):
            size = live.numel() if hasattr(live, "numel") else getattr(live, "size", 1)
            if size > 1 and not copies.slots[self.number].bulk:
                return live  # a batch drawn since; a running mean has one element
        if self.number not in back.done:
            back.done[self.number] = copies.restored(self.number)
        return back.done[self.number]


class ObjectRef(Value):
    """An object of a class of the job's own: its attributes are restored, the object stays."""

    __slots__ = ("cells", "fields", "id", "reference", "type")

    def __init__(self, value: Any) -> None:
        self.id = id(value)
        self.reference = weak(value)
        self.type = type_name(value)
        self.fields = Fields()
        self.cells = Fields()  # of a function: the variables of its closure

    def restore(self, live: Any, back: Restoration, path: str) -> Any:
        target = find(self.reference, self.id, live)
        if target is None or id(self) in back.done:
            return ABSENT if target is None else target
        back.done[id(self)] = target
        own = attributes(target)
        for name, value in self.fields.content(own, back, lambda name: f"{path}.{name}").items():
            if own.get(name, ABSENT) is not value:
                set_attribute(target, name, value)
        if not isinstance(target, type):
            for name in self.fields.added(own, back, f"{path}."):
                object.__delattr__(target, name)
        cells = closure(target)
        now = {name: cell.cell_contents for name, cell in cells.items()}
        for name, value in self.cells.content(now, back, lambda name: f"{path}.{name}").items():
            if now.get(name, ABSENT) is not value:
                cells[name].cell_contents = value
        return target


class SavedMethod(Value):
    """A method bound to such an object."""

    __slots__ = ("owner",)

    def __init__(self, owner: Value) -> None:
        self.owner = owner

    def restore(self, live: Any, back: Restoration, path: str) -> Any:
        if isinstance(live, MethodType):
            self.owner.restore(live.__self__, back, path)
        return live


class RngState(Value):
    """A random generator of the job's own."""

    __slots__ = ("id", "reference", "state", "type")

    def __init__(self, value: Any) -> None:
        self.id = id(value)
        self.reference = weak(value)
        self.type = type_name(value)
        self.state = rng.state_of(value)

    def restore(self, live: Any, back: Restoration, path: str) -> Any:
        if back.keep_data:
            return live
        generator = find(self.reference, self.id, live)
        if generator is None:
            return ABSENT
        rng.set_state_of(generator, self.state)
        return generator


class IdentityRef(Value):
    """Any other object, by its identity only.

    Args:
        lost: it cannot be restored, such as an iterator that cannot be rewound.
        stamp: a function whose result shows most changes of the object, such as `len`.
        iterator: it has a position of its own.
    """

    __slots__ = ("id", "iterator", "lost", "reference", "stamp", "type")

    def __init__(
        self,
        value: Any,
        lost: bool = False,
        stamp: Optional[Callable[[Any], Any]] = None,
        iterator: bool = False,
    ) -> None:
        self.id = id(value)
        self.reference = weak(value)
        self.type = type_name(value)
        self.lost = lost
        self.iterator = iterator
        self.stamp = None if stamp is None else (stamp, stamp(value))

    def restore(self, live: Any, back: Restoration, path: str) -> Any:
        value = find(self.reference, self.id, live)
        if self.lost or value is None:
            back.miss(path)
            return live
        if self.stamp is not None and self.stamp[0](value) != self.stamp[1]:
            back.miss(path)
        return value
