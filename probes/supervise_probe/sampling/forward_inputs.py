"""The Python state of a model, and random states: kept before a forward that the job did not ask
for, put back behind it.

A bounded walk finds what the modules hold: their own attributes, and containers and plain objects
in these. Everything comes back by identity: the very objects that were there. Plain tensors are not
written at all: clones stand in for them meanwhile, so that a graph of the job that holds one never
sees a new version, and nothing is copied back.

Not entered are functions, types, and objects of torch's own classes. What cannot be kept is
refused: iterators, modules that are not registered, too much, or too deep. Of the generators, only
those that the job has imported or initialised are read, and its own ones: in modules, and in the
files and closures of their code, where a forward may draw from them.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Optional

from ..runtime.call_stack import is_library
from ..torch_state.structure import own_attributes, set_attribute, slot_names


class RandomState(NamedTuple):
    """One global generator: its name, how to set it back, and to what."""

    name: str
    set_back: Callable[[Any], Any]
    content: Any


def capture_random_states(torch: ModuleType) -> list[RandomState]:
    """The state of torch's CPU generator, of CUDA's if initialised, of numpy and `random`."""
    generators = {"torch": torch.default_generator}
    if torch.cuda.is_initialized():
        for number, generator in enumerate(torch.cuda.default_generators):
            generators[f"cuda:{number}"] = generator
    states = [RandomState(name, g.set_state, g.get_state()) for name, g in generators.items()]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        states.append(RandomState("numpy", numpy.set_state, numpy.get_state()))
    chance = sys.modules.get("random")
    if chance is not None:
        states.append(RandomState("random", chance.setstate, chance.getstate()))
    return states


def restore_random_state(states: list[RandomState]) -> None:
    """Set every global generator back."""
    for state in states:
        state.set_back(state.content)


def seed_all(torch: ModuleType, number: int) -> None:
    """Let every generator of `capture_random_states` begin at `number`."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(number)
    for name in ("numpy.random", "random"):
        module = sys.modules.get(name)
        if module is not None:
            module.seed(number)


def seed_generator(generator: Any, number: int) -> None:
    """Let a generator of one of `generator_types` begin at `number`."""
    if hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        bits.state = type(bits)(number).state
    elif hasattr(generator, "manual_seed"):
        generator.manual_seed(number)
    else:
        generator.seed(number)


def generator_types(torch: ModuleType) -> tuple[type, ...]:
    """The classes of generators that a job makes for itself, as far as they are loaded."""
    types: list[type] = [torch.Generator]
    for module, names in _CLASSES.items():
        loaded = sys.modules.get(module)
        types += [getattr(loaded, name) for name in names if hasattr(loaded, name)]
    return tuple(types)


def generator_state(generator: Any) -> Any:
    """The state of a generator of one of `generator_types`, independent of the generator."""
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    read: Optional[Callable[[], Any]] = getattr(generator, "getstate", None)
    return read() if read is not None else generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Give a generator the state that `generator_state` returned."""
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)


_CLASSES: dict[str, tuple[str, ...]] = {
    "numpy.random": ("Generator", "RandomState"),
    "random": ("Random",),
}

Exchange = Callable[[Any], Any]
Alike = Callable[[Any, Any], bool]
_PLACES: list[int] = []


class Holder:
    """One object that holds others.

    Attributes:
        name: for people. content: what it held, by key, in order.
    """

    __slots__ = ("content", "name", "target")

    def __init__(self, target: Any, name: str) -> None:
        self.target, self.name = target, name
        self.content = self.read()

    def read(self) -> list[tuple[Any, Any]]:
        """Return what it holds now, by key, in order."""
        raise NotImplementedError

    def write(self, key: Any, value: Any) -> None:
        """Put one value in the place of another."""
        raise NotImplementedError

    def restore_content(self) -> None:
        """Hold the old content, whatever it holds now."""
        raise NotImplementedError

    def label(self, key: Any) -> str:
        """Return the name of what is held under `key`."""
        return f"{self.name}.{key}" if type(key) is str else self.name

    def substitute_values(self, stand_in: Exchange) -> None:
        """Put in what stands in for its values."""
        for key, value in self.content:
            substitute = stand_in(value)
            if substitute is not value:
                self.write(key, substitute)

    def restore_and_name_change(self, alike: Alike) -> str:
        """Hold the old content again; return the name of what was not alike, "" for nothing."""
        now, content = self.read(), self.content
        if len(now) == len(content) and all(
            a is c and b is d for (a, b), (c, d) in zip(now, content)
        ):
            return ""
        changed = ""
        if len(now) != len(content) or any(a is not c for (a, _), (c, _) in zip(now, content)):
            old = {id(key) for key, _ in content}
            changed = next((self.label(key) for key, _ in now if id(key) not in old), self.name)
            self.restore_content()
            return changed
        for (key, new), (_, value) in zip(now, content):
            if new is not value:
                self.write(key, value)
                changed = changed or ("" if alike(new, value) else self.label(key))
        return changed


class Table(Holder):
    """A dict, or the attributes of an object."""

    __slots__ = ()

    def read(self) -> list[tuple[Any, Any]]:
        return list(dict_base(self.target).items(self.target))

    def write(self, key: Any, value: Any) -> None:
        dict_base(self.target).__setitem__(self.target, key, value)

    def restore_content(self) -> None:
        # The order too, and never empty in between: it may be what an attribute is read from.
        base, target = dict_base(self.target), self.target
        content_ids = {id(key) for key, _ in self.content}
        for key in [key for key in base.keys(target) if id(key) not in content_ids]:
            base.__delitem__(target, key)
        for key, value in self.content:
            base.pop(target, key, None)
            base.__setitem__(target, key, value)


class Listing(Holder):
    """A list or a deque; the keys are places."""

    __slots__ = ()

    def read(self) -> list[tuple[Any, Any]]:
        values = list(self._base().__iter__(self.target))
        while len(_PLACES) < len(values):  # keys are compared by identity
            _PLACES.append(len(_PLACES))
        return list(zip(_PLACES, values))

    def write(self, key: Any, value: Any) -> None:
        self._base().__setitem__(self.target, key, value)

    def restore_content(self) -> None:
        base = self._base()
        base.clear(self.target)
        base.extend(self.target, [value for _, value in self.content])

    def _base(self) -> Any:
        return deque if isinstance(self.target, deque) else list


class Bag(Holder):
    """A set; nothing stands in for its members."""

    __slots__ = ()

    def read(self) -> list[tuple[Any, Any]]:
        return [(member, member) for member in set.__iter__(self.target)]

    def substitute_values(self, stand_in: Exchange) -> None:
        pass

    def restore_content(self) -> None:
        set.clear(self.target)
        set.update(self.target, [member for _, member in self.content])


class Slots(Holder):
    """The attributes of an object that are in slots."""

    __slots__ = ()

    def read(self) -> list[tuple[Any, Any]]:
        names = set(slot_names(type(self.target)))
        return [pair for pair in own_attributes(self.target).items() if pair[0] in names]

    def write(self, key: Any, value: Any) -> None:
        set_attribute(self.target, key, value)

    def restore_content(self) -> None:
        old: dict[str, Any] = dict(self.content)
        for name, _ in self.read():
            if name not in old:
                object.__delattr__(self.target, name)
        for name, value in self.content:
            set_attribute(self.target, name, value)


def make_holders(value: Any, kind: str, name: str) -> list[Holder]:
    """Return the holders of a value of this kind (see `TypeClasses`): none, one, or several."""
    holders: list[Holder] = []
    if kind == "dict":
        holders.append(Table(value, name))
    elif kind == "set":
        holders.append(Bag(value, name))
    elif kind == "sequence" and not isinstance(value, tuple):
        holders.append(Listing(value, name))
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        attributes = None
    if type(attributes) is dict:
        holders.append(Table(attributes, name))
    if kind in ("object", "other") and slot_names(type(value)):
        holders.append(Slots(value, name))
    return holders


_TYPES_MAX = 4096
_CONSTANTS = (int, float, complex, str, bytes, type(None), type(...), range, slice)
_PLAIN_OBJECTS = (("types", "SimpleNamespace"), ("argparse", "Namespace"))
_IMMUTABLE = (
    ("enum", "Enum"),
    ("pathlib", "PurePath"),
    ("datetime", "date"),
    ("datetime", "timedelta"),
    ("decimal", "Decimal"),
    ("fractions", "Fraction"),
    ("numpy", "generic"),
    ("numpy", "dtype"),
)
_NEVER_ENTERED = (
    ("threading", "Thread"),
    ("multiprocessing.process", "BaseProcess"),
    ("io", "IOBase"),
    ("builtins", "BaseException"),
)
_RAW = (bytearray, memoryview)
_EXACT: dict[type, str] = {
    FunctionType: "function",
    MethodType: "method",
    ModuleType: "code",
    BuiltinFunctionType: "code",
}


class TypeClasses:
    """The class of each Python type; cached per type."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._known: dict[type, str] = {}

    def class_of(self, kind: type) -> str:
        """Return one of constant, code, class, function, method, tensor, array, dict, sequence,
        set, rng, training, object, iterator, other."""
        decision = self._known.get(kind)
        if decision is None:
            if len(self._known) > _TYPES_MAX:  # a job that creates classes dynamically
                self._known.clear()
            decision = self._known[kind] = self._decide(kind)
        return decision

    def _decide(self, kind: type) -> str:
        torch = self._torch
        if kind in _EXACT:
            return _EXACT[kind]
        fixed = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
        if issubclass(kind, (*_CONSTANTS, *fixed, *_loaded(_IMMUTABLE))):
            return "constant"
        if issubclass(kind, type):
            return "class"
        if issubclass(kind, tuple):
            return "sequence" if kind is tuple or hasattr(kind, "_fields") else "other"
        if issubclass(kind, torch.Tensor):
            return "tensor"
        if issubclass(kind, _loaded((("numpy", "ndarray"),))):
            return "array"
        if issubclass(kind, generator_types(torch)):
            return "rng"
        schedulers, scalers = torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler
        if issubclass(kind, (torch.nn.Module, torch.optim.Optimizer, schedulers, scalers)):
            return "training"
        if issubclass(kind, _loaded((("logging", "Logger"),))):
            return "code"
        if issubclass(kind, _loaded(_NEVER_ENTERED)):
            return "other"
        if issubclass(kind, dict):
            return "dict"
        if issubclass(kind, (list, deque)):
            return "sequence"
        if issubclass(kind, set):
            return "set"
        if kind in _loaded(_PLAIN_OBJECTS) or is_job_class(kind):
            return "object"
        return "iterator" if hasattr(kind, "__next__") or kind in _RAW else "other"


def _loaded(names: Iterable[tuple[str, str]]) -> tuple[type, ...]:
    kinds = (getattr(sys.modules.get(module), name, None) for module, name in names)
    return tuple(kind for kind in kinds if isinstance(kind, type))


def is_job_class(kind: type) -> bool:
    """Whether a class is defined in the job's own files."""
    if kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return isinstance(file, str) and not is_library(file)


def dict_base(table: dict[Any, Any]) -> Any:
    """Return the class whose methods read and write a dict; an OrderedDict has its own order."""
    return OrderedDict if isinstance(table, OrderedDict) else dict


DEPTH = 4  # containers in containers
MOST_ENTRIES = 20_000
MOST_BYTES = 64 << 20  # of tensors and arrays
_ATOMS = (bool, int, float, str, bytes)
_CODE = frozenset(("constant", "code", "class", "function", "method"))
_CONTAINERS = frozenset(("dict", "sequence", "set"))
# Libraries whose objects hold nothing that a forward changes, but threads and locks; and the probe.
_SKIPPED = frozenset(
    (
        "torch",
        "logging",
        "threading",
        "weakref",
        "concurrent",
        "multiprocessing",
        "asyncio",
        __name__.partition(".")[0],
    )
)
_OF_TORCH = frozenset(
    (
        "training",
        "_non_persistent_buffers_set",
        "_backward_pre_hooks",
        "_backward_hooks",
        "_is_full_backward_hook",
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_modules",
        "_parameters",
        "_buffers",
    )
)


class RefusedError(Exception):
    """The model cannot be run once more; the message says why."""


class NeverError(RefusedError):
    """Nor can it be at any later time."""


class ModuleState:
    """What all modules of a model hold.

    Args:
        kinds: classifies values.

    Attributes:
        modules: of the model, in order.
        weights: parameters, and tensors of classes of their own, by id: nothing stands in for them.
        tensors: plain tensors by id, for which clones stand in.

    Raises:
        NeverError: it cannot be kept.
    """

    def __init__(self, torch: Any, root: Any, kinds: TypeClasses) -> None:
        self._torch, self._kinds = torch, kinds
        self.modules: list[Any] = list(root.modules())
        self._modes = tuple(module.training for module in self.modules)
        self._registered = {id(module) for module in self.modules}
        self.weights: dict[int, Any] = {}
        self.tensors: dict[int, Any] = {}
        self._clones: dict[int, Any] = {}
        self._chance: list[tuple[Any, Any]] = []
        self._arrays: list[tuple[str, Any, Any]] = []
        self._holders: list[Holder] = []
        self._empty: list[tuple[str, dict[Any, Any]]] = []  # most tables of torch's are
        self._seen: set[int] = set()
        self._entries = self._bytes = 0
        for module in self.modules:
            self._module(module)
        for generator in _generators_of_code({type(module) for module in self.modules}, kinds):
            self._look(generator, "chance", 1)

    def set_modes(self, modes: tuple[bool, ...]) -> None:
        """Give all modules these modes (train or eval), in order, and let clones stand in."""
        self._set_modes(modes)
        for holder in self._holders:
            holder.substitute_values(self._stand_in)

    def seed(self, number: int) -> None:
        """Let the model's own generators begin at `number`."""
        for generator, _ in self._chance:
            seed_generator(generator, number)

    def restore_and_name_change(self) -> str:
        """Put everything back that is not as it was; never raises.

        Returns:
            The name of what had changed, other than tensors and chance; "" where nothing had.
        """
        self._set_modes(self._modes)
        changed = [
            try_put_back(holder.name, holder.restore_and_name_change, self._alike)
            for holder in self._holders
        ]
        changed += [try_put_back(empty[0], _empty, *empty) for empty in self._empty]
        changed += [try_put_back(array[0], _put_back_array, *array) for array in self._arrays]
        changed += [
            try_put_back("chance", set_generator_state, *generator) for generator in self._chance
        ]
        return next((str(name) for name in changed if name), "")

    def _set_modes(self, modes: tuple[bool, ...]) -> None:
        for module, mode in zip(self.modules, modes):
            mine = vars(module)
            if "training" in mine:  # a compiled one has that of its original
                mine["training"] = mode

    # ── the walk ──────────────────────────────────────────────────────────────────────────────

    def _module(self, module: Any) -> None:
        mine, name = vars(module), type(module).__name__
        self._holders.append(Table(mine, name))
        for key, value in mine.items():
            if key not in _OF_TORCH:
                if type(value) not in _ATOMS and value is not None:
                    self._look(value, f"{name}.{key}", 1)
            elif isinstance(value, dict):
                if dict.__len__(value):
                    self._holders.append(Table(value, name))
                else:
                    self._empty.append((f"{name}.{key}", value))
            elif isinstance(value, set):
                self._holders.append(Bag(value, name))
        for table in ("_parameters", "_buffers"):
            for key, value in mine[table].items():
                self._look(value, f"{name}.{key}", 1)

    def _look(self, value: Any, name: str, depth: int) -> None:
        """Take in a value, and what it holds."""
        kind = self._kinds.class_of(type(value))
        self._entries += 1
        if self._entries > MOST_ENTRIES:
            raise NeverError(f"its modules hold more than {MOST_ENTRIES} values")
        if kind in _CODE or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if kind == "tensor":
            self._tensor(value)
        elif kind == "array":
            self._count(value.nbytes)
            self._arrays.append((name, value, value.copy()))
        elif kind == "rng":
            self._chance.append((value, generator_state(value)))
        elif kind == "iterator":
            raise NeverError(f"{name} is an iterator")
        elif kind == "training":
            if isinstance(value, self._torch.nn.Module) and id(value) not in self._registered:
                raise NeverError(f"{name} is a module that is not registered")
        elif kind in _CONTAINERS or type(value).__module__.partition(".")[0] not in _SKIPPED:
            self._enter(value, kind, name, depth)

    def _enter(self, value: Any, kind: str, name: str, depth: int) -> None:
        """Take in what a container or an object holds."""
        holders = make_holders(value, kind, name)
        self._holders += holders
        items = [(holder.label(key), item) for holder in holders for key, item in holder.content]
        if kind == "sequence" and isinstance(value, tuple):
            items += [(name, element) for element in tuple.__iter__(value)]
        if items and depth > DEPTH:
            raise NeverError(f"{name} is more than {DEPTH} deep in its modules")
        for label, element in items:
            self._look(element, label, depth + 1)

    def _tensor(self, tensor: Any) -> None:
        if type(tensor) is self._torch.Tensor:
            self._count(tensor.numel() * tensor.element_size())
            self.tensors[id(tensor)] = tensor
        else:
            self.weights[id(tensor)] = tensor

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > MOST_BYTES:
            raise NeverError(f"the buffers have {self._bytes >> 20} MB")

    # ── what stands in ────────────────────────────────────────────────────────────────────────

    def _stand_in(self, value: Any) -> Any:
        """Return a clone of a tensor; of anything else itself, but for a tuple that holds one."""
        if type(value) is tuple:
            several = tuple(map(self._stand_in, value))
            return value if all(a is b for a, b in zip(several, value)) else several
        if type(value) is not self._torch.Tensor or id(value) not in self.tensors:
            return value
        clone = self._clones.get(id(value))
        if clone is None:
            clone = self._clones[id(value)] = value.detach().clone()
        return clone

    def _alike(self, now: Any, was: Any) -> bool:
        """Whether a value in the place of another is no news: equal, or a tensor for a tensor."""
        plain = self._torch.Tensor
        if now is was or (type(now) in _ATOMS and type(now) is type(was) and now == was):
            return True
        if type(now) is tuple and type(was) is tuple and len(now) == len(was):
            return all(map(self._alike, now, was))
        return all(value is None or type(value) is plain for value in (now, was))


NAMESPACES = 64  # of the job's files; our choice


def _generators_of_code(classes: Iterable[type], kinds: TypeClasses) -> Iterator[Any]:
    """Yield generators that the job's code of these classes, or what it names, may draw from."""
    bases = {base for kind in classes for base in kind.__mro__ if is_job_class(base)}
    functions = [value for base in bases for value in vars(base).values()]
    tables: dict[int, dict[str, Any]] = {}
    while functions and len(tables) < NAMESPACES:
        function = functions.pop()
        if isinstance(function, (staticmethod, classmethod)):
            function = function.__func__
        if type(function) is not FunctionType:
            continue
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it is empty
                yield from _generators_in([cell.cell_contents], kinds)
        table = function.__globals__
        if id(table) in tables or is_library(function.__code__.co_filename):
            continue
        tables[id(table)] = table
        values = list(table.values())
        yield from _generators_in(values, kinds)
        functions += [value for value in values if type(value) is FunctionType]
        modules = [vars(value) for value in values if type(value) is ModuleType]
        for names in modules:
            if not is_library(str(names.get("__file__") or "<built-in>")):
                functions += [value for value in names.values() if type(value) is FunctionType]


def _generators_in(values: Iterable[Any], kinds: TypeClasses) -> Iterator[Any]:
    return (value for value in values if kinds.class_of(type(value)) == "rng")


def try_put_back(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)`; return what it does, or `name` if it fails: the rest must go on."""
    try:
        return function(*args)
    except Exception:
        return name


def _put_back_array(name: str, array: Any, copy: Any) -> str:
    if array.shape == copy.shape and array.tobytes() == copy.tobytes():
        return ""
    array[...] = copy
    return name


def _empty(name: str, table: dict[Any, Any]) -> str:
    if not dict.__len__(table):
        return ""
    dict_base(table).clear(table)
    return name
