"""With this directory on PYTHONPATH, `import torch` and the first optimizer take half the time.

Torch imports its compiler with the first optimizer or process group, 0.8 s of CPU, to mark
functions that the compiler is to leave alone. Jobs that compile nothing get a module that marks
nothing. What torch knows of operators without data, on the `meta` device, is another 0.3 s that no
job here needs. Packages that `import torch` loads and hardly any job uses are loaded when they are
used, a tenth of what is left.
"""

import contextlib
import sys
import threading
import types
from importlib.machinery import ModuleSpec, PathFinder

_dynamo = types.ModuleType("torch._dynamo")
_dynamo.disable = lambda function=None, recursive=True, **_: function
_dynamo.graph_break = lambda *_, **__: None
_dynamo.set_stance = lambda *_, **__: contextlib.nullcontext()
_dynamo.utils = types.SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization")
_dynamo.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
sys.modules["torch._dynamo"] = _dynamo


class _NoMeta:
    """Finder and loader of a `torch._meta_registrations` that registers nothing."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, _NoMeta) if name == "torch._meta_registrations" else None

    @staticmethod
    def create_module(spec):
        return None

    @staticmethod
    def exec_module(module):
        """Do what the real one's imports do besides: without it there is no torch.Generator."""
        from torch._C import _set_generator_metaclass
        from torch._opaque_base import OpaqueBaseMeta

        _set_generator_metaclass(OpaqueBaseMeta)
        sys.meta_path.remove(_NoMeta)


sys.meta_path.insert(0, _NoMeta)


class _Unused(types.ModuleType):
    """A module that is loaded when somebody asks it for a name."""

    _loading = threading.RLock()

    def __getattr__(self, name):
        if name.startswith("__"):  # what looks through all modules asks for those
            raise AttributeError(name)
        with self._loading:
            if type(self) is _Unused:
                self.__class__ = types.ModuleType
                self.__spec__.loader.real.exec_module(self)
        return getattr(self, name)


class _WhenUsed:
    """Finder of such modules, and the loader of one."""

    # `torch.export` and what it imports would come in an order in which torch cannot be imported.
    names = frozenset(
        f"torch.{name}"
        for name in ("_native", "distributions", "masked", "nested", "nn.intrinsic", "quantization")
    )

    def __init__(self, real):
        self.real = real

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in _WhenUsed.names:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _WhenUsed(spec.loader)
        return spec

    @staticmethod
    def create_module(spec):
        return None

    @staticmethod
    def exec_module(module):
        module.__class__ = _Unused


sys.meta_path.insert(0, _WhenUsed)
