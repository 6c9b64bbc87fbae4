"""Classification of a value by its type alone, for a walk over the inputs of a model.

Rule 1: the walk enters data and objects of the job's own classes only; a library's objects are
referenced by identity.
Rule 2: no code of the job is called: no property, no `__getattr__`, no `__len__`.
"""

import sys
from collections import OrderedDict, deque
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Dict, Iterable, Tuple

from ..runtime import rng
from .call_stack import is_library

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
_EXACT: Dict[type, str] = {
    FunctionType: "function",
    MethodType: "method",
    ModuleType: "code",
    BuiltinFunctionType: "code",
}


class TypeClasses:
    """The class of each Python type; cached per type."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._known: Dict[type, str] = {}

    def of(self, kind: type) -> str:
        """Return one of constant, code, class, function, method, tensor, array, dict, sequence,
        set, rng, training, object, iterator, other."""
        known = self._known.get(kind)
        if known is None:
            if len(self._known) > _TYPES_MAX:  # a job that creates classes dynamically
                self._known.clear()
            known = self._known[kind] = self._decide(kind)
        return known

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
        if issubclass(kind, rng.generator_types(torch)):
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

    def is_constant(self, value: Any) -> bool:
        """Whether a value is immutable data."""
        return self.of(type(value)) == "constant"


def _loaded(names: Iterable[Tuple[str, str]]) -> Tuple[type, ...]:
    found = (getattr(sys.modules.get(module), name, None) for module, name in names)
    return tuple(kind for kind in found if isinstance(kind, type))


def is_job_class(kind: type) -> bool:
    """Whether a class is defined in the job's own files."""
    if kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return isinstance(file, str) and not is_library(file)


def dict_base(table: Dict[Any, Any]) -> Any:
    """Return the class whose methods read and write a dict; an OrderedDict has its own order."""
    return OrderedDict if isinstance(table, OrderedDict) else dict
