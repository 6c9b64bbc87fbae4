"""What a savepoint remembers of the job's plain variables, and how each kind of value comes back.

Rule 1: objects of the job are remembered by weak reference or by id, never held.
Rule 2: objects are changed in place, so that every other name for them agrees.
Rule 3: what cannot be brought back is left as it is and named in `Back.missed`.

`variable_walk.py` makes these from live values; containers are in `containers.py`. Every
`restore(live, back, path)` gets what is at the place now (`GONE` if nothing) and returns what
belongs there (`GONE` when that cannot be had again).
"""

from types import FunctionType, MethodType
from typing import Any, Callable, Dict, List, Mapping, Optional

from ..runtime import rng
from ..runtime.object_access import attributes, closure, find, set_attribute, weak
from .tensor_copies import Copies

GONE: Any = type("Gone", (), {"__repr__": lambda self: "GONE"})()
_MISSED_MAX = 50  # names; more do not help a reader


class Back:
    """One restore: where the copies are, what was done already, what could not be done.

    Args:
        keep_data: leave generators, and batches drawn since, as they are.
        is_code: whether a value is a function, class or module, which hold no state by name.
    """

    def __init__(
        self,
        copies: Copies,
        keep_data: bool,
        is_constant: Callable[[Any], bool],
        is_code: Callable[[Any], bool],
    ) -> None:
        self.copies = copies
        self.keep_data = keep_data
        self.is_constant = is_constant
        self.is_code = is_code
        self.done: Dict[int, Any] = {}  # by id of the remembered value: what it became
        self.missed: List[str] = []

    def miss(self, path: str) -> None:
        """Note that the variable `path` keeps its present value."""
        if path not in self.missed and len(self.missed) < _MISSED_MAX:
            self.missed.append(path)


def name_of(value: Any) -> str:
    """The name of a class or function, or that of a value's class."""
    named = value if isinstance(value, (type, FunctionType)) else type(value)
    return str(named.__qualname__)


class Value:
    """Something a savepoint remembers."""

    __slots__ = ()

    def restore(self, live: Any, back: Back, path: str) -> Any:
        """Bring the value back to the place that holds `live` now; returns what belongs there."""
        raise NotImplementedError


class Fields:
    """Named places: the variables of a frame, the attributes of an object, the items of a dict."""

    __slots__ = ("constants", "special")

    def __init__(self) -> None:
        self.constants: Dict[Any, Any] = {}  # immutable values, kept as they are
        self.special: Dict[Any, Value] = {}

    def __contains__(self, key: Any) -> bool:
        return key in self.constants or key in self.special

    def content(
        self, live: Mapping[Any, Any], back: Back, path: Callable[[Any], str]
    ) -> Dict[Any, Any]:
        """What belongs into each place, without what is gone; that is noted as missed."""
        content = dict(self.constants)
        for key, part in self.special.items():
            value = part.restore(live.get(key, GONE), back, path(key))
            if value is GONE:
                back.miss(path(key))
            else:
                content[key] = value
        return content

    def restore(self, live: Dict[Any, Any], back: Back, prefix: str = "") -> None:
        """Set the places of a namespace back; constants that appeared since are removed."""
        for key, value in self.content(live, back, lambda key: f"{prefix}{key}").items():
            if live.get(key, GONE) is not value:
                live[key] = value
        for key in self.appeared(live, back, prefix):
            del live[key]

    def appeared(self, live: Mapping[Any, Any], back: Back, prefix: str = "") -> List[Any]:
        """The constants that were not there before; any other new data is noted as missed."""
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

    def restore(self, live: Any, back: Back, path: str) -> Any:
        copies = back.copies
        if back.keep_data and live is not copies.original(self.number):
            size = live.numel() if hasattr(live, "numel") else getattr(live, "size", 1)
            if size > 1 and not copies.slots[self.number].bulk:
                return live  # a batch drawn since; a running mean has one element
        if self.number not in back.done:
            back.done[self.number] = copies.bring_back(self.number)
        return back.done[self.number]


class ObjectRef(Value):
    """An object of a class of the job's own: its attributes are set back, the object stays."""

    __slots__ = ("cells", "fields", "id", "reference", "type")

    def __init__(self, value: Any) -> None:
        self.id = id(value)
        self.reference = weak(value)
        self.type = name_of(value)
        self.fields = Fields()
        self.cells = Fields()  # of a function: the variables of its closure

    def restore(self, live: Any, back: Back, path: str) -> Any:
        thing = find(self.reference, self.id, live)
        if thing is None or id(self) in back.done:
            return GONE if thing is None else thing
        back.done[id(self)] = thing
        own = attributes(thing)
        for name, value in self.fields.content(own, back, lambda name: f"{path}.{name}").items():
            if own.get(name, GONE) is not value:
                set_attribute(thing, name, value)
        if not isinstance(thing, type):
            for name in self.fields.appeared(own, back, f"{path}."):
                object.__delattr__(thing, name)
        cells = closure(thing)
        now = {name: cell.cell_contents for name, cell in cells.items()}
        for name, value in self.cells.content(now, back, lambda name: f"{path}.{name}").items():
            if now.get(name, GONE) is not value:
                cells[name].cell_contents = value
        return thing


class Bound(Value):
    """A method bound to such an object."""

    __slots__ = ("owner",)

    def __init__(self, owner: Value) -> None:
        self.owner = owner

    def restore(self, live: Any, back: Back, path: str) -> Any:
        if isinstance(live, MethodType):
            self.owner.restore(live.__self__, back, path)
        return live


class RngState(Value):
    """A random generator of the job's own."""

    __slots__ = ("id", "reference", "state", "type")

    def __init__(self, value: Any) -> None:
        self.id = id(value)
        self.reference = weak(value)
        self.type = name_of(value)
        self.state = rng.state_of(value)

    def restore(self, live: Any, back: Back, path: str) -> Any:
        if back.keep_data:
            return live
        generator = find(self.reference, self.id, live)
        if generator is None:
            return GONE
        rng.set_state_of(generator, self.state)
        return generator


class Other(Value):
    """Anything else: only which object it was.

    Args:
        lost: known not to come back, such as an iterator, which cannot be rewound.
        stamp: a function that tells roughly whether the object changed, such as `len`.
        stream: it stands at a place of its own, and goes on from there.
    """

    __slots__ = ("id", "lost", "reference", "stamp", "stream", "type")

    def __init__(
        self,
        value: Any,
        lost: bool = False,
        stamp: Optional[Callable[[Any], Any]] = None,
        stream: bool = False,
    ) -> None:
        self.id = id(value)
        self.reference = weak(value)
        self.type = name_of(value)
        self.lost = lost
        self.stream = stream
        self.stamp = None if stamp is None else (stamp, stamp(value))

    def restore(self, live: Any, back: Back, path: str) -> Any:
        value = find(self.reference, self.id, live)
        if self.lost or value is None:
            back.miss(path)
            return live
        if self.stamp is not None and self.stamp[0](value) != self.stamp[1]:
            back.miss(path)
        return value
