"""Registry of the job's living modules, optimizers, schedulers and scalers, and a scaler's effect.

Rule 1: everything is referenced weakly; a model that the job deletes goes away.
Rule 2: objects are recognised by identity; a class of the job's may define `__eq__` or `__len__`.

Modules announce themselves by torch's official registration hooks, which fire for every parameter,
buffer and child. A deepcopied or unpickled module does not pass there; its `__setstate__` does.

Under a scaler the tensor that goes into backward is the loss times the scale, and gradients stay
scaled until `unscale_`. `GradScalerState` remembers which tensor was which loss, and which
optimizers' gradients are unscaled already; nothing of it outlives a step.

Source: torch/amp/grad_scaler.py; a job may clip before `unscale_`, and then clips scaled gradients.
"""

from __future__ import annotations

import functools
import gc
import weakref
from time import monotonic_ns
from types import ModuleType
from typing import Any, Callable, Iterator

from ..runtime.call_stack import job_line
from ..runtime.guard import hidden_from_stacklevel
from ..runtime.scalars import Number, Scalars

_HOOKS = (
    "register_module_module_registration_hook",
    "register_module_parameter_registration_hook",
    "register_module_buffer_registration_hook",
)
SCANS, SCAN_SHARE = 2, 1e-3  # of the heap at any time, further ones by time; project defaults
# These four do not call each other's constructor.
_SCHEDULERS = ("LRScheduler", "ReduceLROnPlateau", "SequentialLR", "ChainedScheduler")


class Alive:
    """A weak set by identity, in order of arrival."""

    def __init__(self) -> None:
        self._references: dict[int, Any] = {}
        self.changes = 0  # grows with every arrival and departure

    def add(self, thing: Any) -> None:
        """Note an object; twice is once."""
        number = id(thing)
        previous = self._references.get(number)
        if previous is not None and previous() is thing:
            return
        references = weakref.ref(self)

        def forget(reference: Any) -> None:
            alive = references()
            if alive is not None and alive._references.get(number) is reference:
                del alive._references[number]
                alive.changes += 1

        self._references[number] = weakref.ref(thing, forget)
        self.changes += 1

    def __iter__(self) -> Iterator[Any]:
        for reference in list(self._references.values()):
            thing = reference()
            if thing is not None:
                yield thing


class Registry:
    """The job's training objects that are alive now."""

    def __init__(self, clock: Callable[[], int] = monotonic_ns) -> None:
        self._clock = clock
        self.modules = Alive()
        self.optimizers = Alive()
        self.schedulers = Alive()
        self.scalers = Alive()
        self._torch: Any = None
        self._made: dict[int, tuple[Any, str]] = {}  # optimizers by id, and where they were made
        self._searched: tuple[int, int] = (-1, -1)
        self._scans, self._scan_from_ns = 0, 0  # of the heap; when another may be made
        self._scan_waits = False  # until then
        self._roots: tuple[tuple[int, int], list[Any]] = ((-1, -1), [])

    def install(self, torch: ModuleType) -> None:
        """Record every such object from now on. Call it once, when torch is imported."""
        self._torch = torch
        for name in _HOOKS:
            hook = getattr(torch.nn.modules.module, name, None)
            if hook is not None:
                hook(self._saw_registration)
        _call_after(torch.nn.Module, "__setstate__", self.modules.add)
        _call_after(torch.optim.Optimizer, "__init__", self._saw_optimizer)
        for name in _SCHEDULERS:
            kind = getattr(torch.optim.lr_scheduler, name, None)
            if kind is not None:
                _call_after(kind, "__init__", self.schedulers.add)
        for home in (torch.amp, torch.cuda.amp):
            if "GradScaler" in vars(home):
                _call_after(home.GradScaler, "__init__", self.scalers.add)

    def register(self, thing: Any) -> None:
        """Note a training object that came by in some other way."""
        torch = self._torch
        if isinstance(thing, torch.nn.Module):
            self.modules.add(thing)
        elif isinstance(thing, torch.optim.Optimizer):
            self.optimizers.add(thing)
        elif isinstance(thing, torch.amp.GradScaler):
            self.scalers.add(thing)
        else:
            self.schedulers.add(thing)

    def creation_line(self, optimizer: Any) -> str:
        """Return the job's line that made an optimizer, "" where that is not known."""
        reference, line = self._made.get(id(optimizer), (None, ""))
        return line if reference is not None and reference() is optimizer else ""

    def _saw_optimizer(self, optimizer: Any) -> None:
        self.optimizers.add(optimizer)
        alive = {number: entry for number, entry in self._made.items() if entry[0]() is not None}
        self._made = {**alive, id(optimizer): (weakref.ref(optimizer), job_line())}

    def roots(self) -> list[Any]:
        """The outermost modules that own parameters of the optimizers, in order of arrival.

        Kept until a module or optimizer comes or goes, or a scan that waits may be made.
        """
        state = (self.modules.changes, self.optimizers.changes)
        is_due = self._scan_waits and self._clock() >= self._scan_from_ns
        if is_due or self._roots[0] != state:
            trained = {id(p) for o in self.optimizers for g in o.param_groups for p in g["params"]}
            owned = self._find_owners(trained)
            # Else a new optimizer of a tensor of no module costs a walk through all modules.
            outermost = [] if trained.isdisjoint(owned) else self._outermost(trained)
            references = [weakref.ref(module) for module in outermost]
            self._roots = ((self.modules.changes, self.optimizers.changes), references)
        alive = [reference() for reference in self._roots[1]]
        return [module for module in alive if module is not None]

    def has_uncleared_gradients(self, zeroed_ids: "set[int]") -> bool:
        """Whether anything is left of a backward in other parameters than these ids.

        Sharded parameters do not show what they gather: they count as gradients.
        """
        is_known = False
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    is_known = True
                    if _full(p) and id(p) not in zeroed_ids:
                        return True
        return not is_known and any(
            _full(p) and id(p) not in zeroed_ids
            for module in self.modules
            for p in module.parameters(recurse=False)
        )

    def _outermost(self, trained: "set[int]") -> list[Any]:
        modules = list(self.modules)
        inner = {id(child) for module in modules for child in module.children()}
        return [
            module
            for module in modules
            if id(module) not in inner and any(id(p) in trained for p in module.parameters())
        ]

    def _find_owners(self, trained: "set[int]") -> "set[int]":
        """Look through all objects for modules made before `install`, if a parameter has no owner.

        Returns the ids of all parameters that have one.

        Once for a set of optimizers. A scan takes 60 ms, and in a heap of millions of objects half
        a second, where a job may make an optimizer for each sample: behind the first two, which see
        what was made before, scans take 0.1 % of the time at most.
        """
        state, owned = (self.optimizers.changes, len(trained)), self._owned()
        self._scan_waits = False
        if self._searched == state or trained <= owned:
            return owned
        began = self._clock()
        if self._scans >= SCANS and began < self._scan_from_ns:
            self._scan_waits = True
            return owned
        self._searched = state
        self._scans += 1
        kind = self._torch.nn.Module
        # `type()`: `isinstance` would ask `__class__` of lazy modules and the like.
        for thing in gc.get_objects():
            if issubclass(type(thing), kind):
                self.modules.add(thing)
        ended = self._clock()
        self._scan_from_ns = ended + int((ended - began) / SCAN_SHARE)
        return self._owned()

    def _owned(self) -> "set[int]":
        tables = (
            module._parameters for module in self.modules
        )  # `parameters()` takes 5 times that
        return {id(p) for table in tables for p in table.values() if p is not None}

    def _saw_registration(self, module: Any, name: str, member: Any) -> None:
        self.modules.add(module)
        if isinstance(member, self._torch.nn.Module):
            self.modules.add(member)


def _full(p: Any) -> bool:
    return p.grad is not None or hasattr(p, "_local_tensor")


def _call_after(kind: type, name: str, record: Callable[[Any], None]) -> None:
    """Wrap a method of `kind` so that `record` gets the object after it."""
    original = getattr(kind, name)

    @functools.wraps(original)
    @hidden_from_stacklevel
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        record(self)
        return result

    setattr(kind, name, wrapper)


NOBODY: frozenset[int] = frozenset()


class GradScalerState:
    """The scaler's part in the step that is under way.

    Attributes:
        scaler: the GradScaler whose `step()` is running, else None.
        appeared: called when a GradScaler is used; more than once, it may be.
        unscaled: ids of the optimizers whose gradients are unscaled in this step.
    """

    def __init__(self, scalars: Scalars) -> None:
        self.scaler: Any = None
        self.appeared: Callable[[], None] = lambda: None
        self._scalars = scalars
        self._losses: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._scale: Any = None  # set while scaled losses wait for their backward
        self.unscaled: frozenset[int] = NOBODY

    def enter(self, scaler: Any) -> None:
        """`scaler.step()` is about to run."""
        self.scaler = scaler
        self.appeared()

    def on_scale(self, scaler: Any, outputs: Any, result: Any) -> None:
        """`scaler.scale(outputs)` returned `result`."""
        if result is outputs:
            return
        self._scale = scaler._scale
        try:
            self._losses[id(result)] = (weakref.ref(result), outputs.detach())
        except (AttributeError, TypeError):  # a list of losses
            pass

    def loss(self, tensor: Any) -> Number:
        """Return the unscaled value of the one-element `tensor` that goes into backward."""
        loss = self._losses.pop(id(tensor), None)
        scale, self._scale = self._scale, None
        if loss is not None and loss[0]() is tensor:
            return self._scalars.value(loss[1])
        value = self._scalars.value(tensor)
        # Scaled, then divided by the accumulation steps, or several scaled losses added up.
        return value if scale is None else value / self._scalars.value(scale)

    def on_unscale(self, optimizer: Any) -> None:
        """`scaler.unscale_(optimizer)` was called."""
        self.unscaled = self.unscaled | {id(optimizer)}

    def scale(self) -> Number:
        """Return the loss scale of the running scaler, 1.0 without one."""
        scale = None if self.scaler is None else self.scaler._scale
        return 1.0 if scale is None else self._scalars.value(scale)

    def forget(self) -> None:
        """The gradients that were unscaled were thrown away."""
        self.unscaled = NOBODY

    def step_ended(self) -> None:
        """Forget the losses and optimizers of the step."""
        self._losses.clear()
        self.unscaled = NOBODY
        self._scale = None
