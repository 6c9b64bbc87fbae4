"""Restoration of saved containers: dicts, lists, deques, tuples, sets.

Rule 1: a container that is still at its place is changed in place, so that every other name for it
agrees; one that was replaced is rebuilt, if its type is one of Python's own.
Rule 2: a container is never held, since it may hold a model; it is recognised by its id.
Rule 3: subclasses are read and written with the methods of their base; none of theirs is called.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, Dict, List, Optional

from .captured_values import ABSENT, Fields, Restoration, Value


class SavedDict(Value):
    """A dict: the same one with its old items, or a new one."""

    __slots__ = ("factory", "fields", "id", "keys", "type")

    def __init__(self, value: Dict[Any, Any]) -> None:
        self.id = id(value)
        self.type = type(value)
        self.keys = list(dict_base(value).keys(value))
        self.fields = Fields()
        factory = getattr(value, "default_factory", None)
        held = isinstance(factory, type) or getattr(factory, "__closure__", self) is None
        self.factory = (factory,) if held else None  # not one that holds objects of the job

    def restore(self, live: Any, back: Restoration, path: str) -> Any:
        if id(self) in back.done:
            return back.done[id(self)]
        target = live if id(live) == self.id and type(live) is self.type else self._new()
        back.done[id(self)] = target
        if target is ABSENT:
            return ABSENT
        now = dict(dict_base(live).items(live)) if isinstance(live, dict) else {}
        content = self.fields.content(now, back, lambda key: f"{path}[{key!r}]")
        for key in self.fields.special:
            if key in now:
                content.setdefault(key, now[key])  # what cannot be restored keeps its present value
        self._apply(target, content)
        return target

    def _apply(self, target: Dict[Any, Any], content: Dict[Any, Any]) -> None:
        """Change only what differs: a dict in use must never be empty meanwhile."""
        base = dict_base(target)
        for key in [key for key in base.keys(target) if key not in content]:
            base.__delitem__(target, key)
        for key, value in content.items():
            if base.get(target, key, ABSENT) is not value:
                base.__setitem__(target, key, value)
        order = [key for key in self.keys if key in content]
        if order != list(base.keys(target)):
            for key in order:
                base.__setitem__(target, key, base.pop(target, key))

    def _new(self) -> Any:
        if self.type is defaultdict:
            return ABSENT if self.factory is None else defaultdict(*self.factory)
        return self.type() if self.type in (dict, OrderedDict, Counter) else ABSENT


class SavedSequence(Value):
    """A list, deque or tuple: the same one with its old elements, or a new one."""

    __slots__ = ("content", "id", "length_max", "special", "type")

    def __init__(self, value: Any) -> None:
        self.id = id(value)
        self.type = type(value)
        self.length_max: Optional[int] = getattr(value, "maxlen", None)
        self.content: List[Any] = []  # None where `special` has the element
        self.special: Dict[int, Value] = {}

    def restore(self, live: Any, back: Restoration, path: str) -> Any:
        if id(self) in back.done:
            return back.done[id(self)]
        fixed = issubclass(self.type, tuple)
        same = id(live) == self.id and type(live) is self.type
        target = live if same or fixed else self._new()
        back.done[id(self)] = target
        now = list(live) if isinstance(live, (list, tuple, deque)) else []
        content = list(self.content)
        for i, part in self.special.items():
            element = now[i] if i < len(now) else ABSENT
            content[i] = part.restore(element, back, f"{path}[{i}]")
        if target is ABSENT or any(element is ABSENT for element in content):
            return ABSENT
        if same and _identical(now, content):
            return target
        if fixed:
            target = back.done[id(self)] = tuple.__new__(self.type, content)
        elif isinstance(target, deque):
            deque.clear(target)
            deque.extend(target, content)
        else:
            list.__setitem__(target, slice(None), content)
        return target

    def _new(self) -> Any:
        if self.type is deque:
            return deque(maxlen=self.length_max)
        return [] if self.type is list else ABSENT


class SavedSet(Value):
    """A set of constants."""

    __slots__ = ("content", "id", "type")

    def __init__(self, value: Any, content: "set[Any]") -> None:
        self.id = id(value)
        self.type = type(value)
        self.content = content

    def restore(self, live: Any, back: Restoration, path: str) -> Any:
        if id(live) != self.id or type(live) is not self.type:
            new = set(self.content) if self.type is set else ABSENT
            return back.done.setdefault(id(self), new)
        if set(live) != self.content:
            live.clear()
            live.update(self.content)
        return live


def dict_base(table: Dict[Any, Any]) -> Any:
    """Return the class whose methods read and write a dict; an OrderedDict has its own order."""
    return OrderedDict if isinstance(table, OrderedDict) else dict


def _identical(a: List[Any], b: List[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b))
