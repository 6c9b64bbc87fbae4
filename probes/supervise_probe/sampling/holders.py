"""Containers of a model's Python state: saved, and put back in place by identity.

Each holder reads and writes with the methods of Python's own types; none of the job's is called.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Dict, List, Tuple

from ..capture.type_classes import dict_base
from ..runtime.object_access import attributes, set_attribute, slots

Exchange = Callable[[Any], Any]
Alike = Callable[[Any, Any], bool]
_PLACES: List[int] = []


class Holder:
    """One object that holds others.

    Attributes:
        name: for people. content: what it held, by key, in order.
    """

    __slots__ = ("content", "name", "target")

    def __init__(self, target: Any, name: str) -> None:
        self.target, self.name = target, name
        self.content = self.read()

    def read(self) -> List[Tuple[Any, Any]]:
        """Return what it holds now, by key, in order."""
        raise NotImplementedError

    def write(self, key: Any, value: Any) -> None:
        """Put one value in the place of another."""
        raise NotImplementedError

    def renew(self) -> None:
        """Hold the old content, whatever it holds now."""
        raise NotImplementedError

    def place(self, key: Any) -> str:
        """Return the name of what is held under `key`."""
        return f"{self.name}.{key}" if type(key) is str else self.name

    def exchange(self, stand_in: Exchange) -> None:
        """Put in what stands in for its values."""
        for key, value in self.content:
            other = stand_in(value)
            if other is not value:
                self.write(key, other)

    def put_back(self, alike: Alike) -> str:
        """Hold the old content again; return the name of what was not alike, "" for nothing."""
        now, content = self.read(), self.content
        if len(now) == len(content) and all(
            a is c and b is d for (a, b), (c, d) in zip(now, content)
        ):
            return ""
        changed = ""
        if len(now) != len(content) or any(a is not c for (a, _), (c, _) in zip(now, content)):
            old = {id(key) for key, _ in content}
            changed = next((self.place(key) for key, _ in now if id(key) not in old), self.name)
            self.renew()
            return changed
        for (key, new), (_, value) in zip(now, content):
            if new is not value:
                self.write(key, value)
                changed = changed or ("" if alike(new, value) else self.place(key))
        return changed


class Table(Holder):
    """A dict, or the attributes of an object."""

    __slots__ = ()

    def read(self) -> List[Tuple[Any, Any]]:
        return list(dict_base(self.target).items(self.target))

    def write(self, key: Any, value: Any) -> None:
        dict_base(self.target).__setitem__(self.target, key, value)

    def renew(self) -> None:
        # The order too, and never empty in between: it may be what an attribute is read from.
        base, target = dict_base(self.target), self.target
        kept = {id(key) for key, _ in self.content}
        for key in [key for key in base.keys(target) if id(key) not in kept]:
            base.__delitem__(target, key)
        for key, value in self.content:
            base.pop(target, key, None)
            base.__setitem__(target, key, value)


class Listing(Holder):
    """A list or a deque; the keys are places."""

    __slots__ = ()

    def read(self) -> List[Tuple[Any, Any]]:
        values = list(self._base().__iter__(self.target))
        while len(_PLACES) < len(values):  # keys are compared by identity
            _PLACES.append(len(_PLACES))
        return list(zip(_PLACES, values))

    def write(self, key: Any, value: Any) -> None:
        self._base().__setitem__(self.target, key, value)

    def renew(self) -> None:
        base = self._base()
        base.clear(self.target)
        base.extend(self.target, [value for _, value in self.content])

    def _base(self) -> Any:
        return deque if isinstance(self.target, deque) else list


class Bag(Holder):
    """A set; nothing stands in for its members."""

    __slots__ = ()

    def read(self) -> List[Tuple[Any, Any]]:
        return [(member, member) for member in set.__iter__(self.target)]

    def exchange(self, stand_in: Exchange) -> None:
        pass

    def renew(self) -> None:
        set.clear(self.target)
        set.update(self.target, [member for _, member in self.content])


class Slots(Holder):
    """The attributes of an object that are in slots."""

    __slots__ = ()

    def read(self) -> List[Tuple[Any, Any]]:
        names = set(slots(type(self.target)))
        return [each for each in attributes(self.target).items() if each[0] in names]

    def write(self, key: Any, value: Any) -> None:
        set_attribute(self.target, key, value)

    def renew(self) -> None:
        old: Dict[str, Any] = dict(self.content)
        for name, _ in self.read():
            if name not in old:
                object.__delattr__(self.target, name)
        for name, value in self.content:
            set_attribute(self.target, name, value)


def of(value: Any, kind: str, name: str) -> List[Holder]:
    """Return the holders of a value of this kind (see `type_classes`): none, one, or several."""
    found: List[Holder] = []
    if kind == "dict":
        found.append(Table(value, name))
    elif kind == "set":
        found.append(Bag(value, name))
    elif kind == "sequence" and not isinstance(value, tuple):
        found.append(Listing(value, name))
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = None
    if type(own) is dict:
        found.append(Table(own, name))
    if kind in ("object", "other") and slots(type(value)):
        found.append(Slots(value, name))
    return found
