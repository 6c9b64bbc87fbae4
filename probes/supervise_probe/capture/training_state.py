"""The training state of one savepoint: modules, gradients, optimizers, schedulers, scalers.

Rule 1: everything is written back in place; no existing object of the job is replaced.
Rule 2: `verify` refuses whatever can be refused, before the first byte is written.

Gradients are included: a job that drops them before the next backward does not need them, but one
that zeroes them in place or accumulates over several steps does, and the two look the same from
outside. They are a quarter of an Adam savepoint.

Where the loop cannot go back, `weights_only`, there is less: parameters, buffers, optimizer state
and scalers. What the loop drives stays as it is: options of groups, schedulers, other attributes.
"""

import weakref
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional, Tuple

from ..torch_state.registry import Registry
from .call_stack import CannotRestore
from .captured_values import ABSENT, Fields, Restoration, Value
from .tensor_copies import TensorCopies, local
from .variable_walk import VariableWalker, is_copyable

_SAVED_ELSEWHERE = frozenset(
    ("_parameters", "_buffers", "_modules", "state", "param_groups", "defaults", "optimizer")
)
LOST = -1  # a gradient that cannot be copied: a sparse one


class TrainingState:
    """The registered objects at the time of the savepoint."""

    def __init__(
        self,
        torch: ModuleType,
        registry: Registry,
        walk: VariableWalker,
        copies: TensorCopies,
        died: Callable[[Any], None],
        weights_only: bool = False,
    ) -> None:
        """Plan the copies; `died` is called when an optimizer is deleted.

        Raises:
            CannotRestore: a parameter is not plain memory.
        """
        self._torch = torch
        self._died = died
        self._copies = copies
        self._weights_only = weights_only
        self.modules: List[SavedModule] = []
        self.parameters: List[SavedParameter] = []
        self.optimizers: List[SavedOptimizer] = []
        self.others: List[Tuple[Any, str, Fields]] = []  # schedulers and scalers, by class name
        self._known: "set[int]" = set()
        self._owned: "set[int]" = set()  # parameters of modules
        self.add_new(registry, walk)

    def add_new(self, registry: Registry, walk: VariableWalker) -> None:
        """Add what was registered since, found by the walk through the frames."""
        walk.bulk = True
        for module in self._unknown(registry.modules):
            numbers = {
                name: self._add_parameter(parameter, f"{type(module).__name__}.{name}")
                for name, parameter in module._parameters.items()
                if parameter is not None and not parameter.is_meta
            }
            self._owned.update(map(id, module._parameters.values()))
            self.modules.append(SavedModule(module, numbers, walk, self._weights_only))
        for optimizer in self._unknown(registry.optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._add_parameter(parameter, f"a parameter of {type(optimizer).__name__}")
            self.optimizers.append(SavedOptimizer(optimizer, walk, self._died, self._weights_only))
        schedulers = [] if self._weights_only else self._unknown(registry.schedulers)
        for thing in (*schedulers, *self._unknown(registry.scalers)):
            name = type(thing).__name__
            self.others.append(
                (weakref.ref(thing), name, walk.fields(_own_attributes(thing), depth=1))
            )
        walk.bulk = False

    def _unknown(self, alive: Any) -> List[Any]:
        new = [thing for thing in alive if id(thing) not in self._known]
        self._known.update(map(id, new))
        return new

    def _add_parameter(self, parameter: Any, name: str) -> int:
        if not is_copyable(self._torch, parameter):
            raise CannotRestore(
                f"{name} is a {type(parameter).__name__} on {parameter.device}, laid out as "
                f"{parameter.layout}; only dense tensors on CPU or CUDA can be saved"
            )
        number = self._copies.add(parameter, bulk=True)
        if id(parameter) not in self._known:
            self._known.add(id(parameter))
            torch = None if self._weights_only else self._torch
            self.parameters.append(SavedParameter(name, number, parameter, torch, self._copies))
        return number

    def is_alive(self) -> bool:
        """Whether all optimizers, and the parameters they train, still exist."""
        return all(optimizer.reference() is not None for optimizer in self.optimizers)

    def verify(self) -> None:
        """Raise CannotRestore unless `restore` can write everything back."""
        # Another parameter may have the id of one that was deleted.
        deleted = {p.id for p in self.parameters if self._copies.original(p.number) is None}
        for optimizer in self.optimizers:
            optimizer.verify(deleted)
        for module in self.modules:
            module.verify(self._copies)
        for parameter in self.parameters:
            parameter.verify(self._copies)
        if self._copies.any_shape_changed():
            raise CannotRestore("optimizer state changed its shape or type since the savepoint")

    def verify_weights(self) -> None:
        """Raise CannotRestore unless what the optimizers train are the model's own parameters.

        Mixed-precision libraries (apex, DeepSpeed, Megatron) train copies and write them over the
        weights after each step: they would undo a rollback that does not know them.
        """
        for optimizer in self.optimizers:
            if any(not self._owned.issuperset(group) for group in optimizer.members):
                raise CannotRestore(
                    f"{optimizer.name} trains tensors that are no parameters of a module: copies "
                    "of the weights may be kept elsewhere, and a rollback would miss them"
                )

    def attributes(self) -> List[Tuple[Fields, Dict[str, Any]]]:
        """Return the saved and the present attributes of modules, schedulers and scalers."""
        saved = [(module.reference(), module.attributes) for module in self.modules]
        saved += [(reference(), fields) for reference, _, fields in self.others]
        return [(fields, thing.__dict__) for thing, fields in saved if thing is not None]

    def restore(self, back: Restoration) -> None:
        """Write everything back."""
        self._copies.write_training_state()
        for parameter in self.parameters:
            parameter.restore(self._copies, back)
        for module in self.modules:
            module.restore(back)
        for optimizer in self.optimizers:
            optimizer.restore(back)
        for reference, _, fields in self.others:
            thing = reference()
            if thing is not None:
                _restore_attributes(fields, thing.__dict__, back, f"{type(thing).__name__}.")

    def restore_weights(self, back: Restoration) -> None:
        """Write back what updates change; gradients become zero, and the loop keeps its state."""
        self._copies.write_training_state()
        for parameter in self.parameters:
            parameter.zero_gradient(self._copies)
        for module in self.modules:
            module.restore_buffers(back)
        for optimizer in self.optimizers:
            optimizer.restore_state(back)
        for reference, name, fields in self.others:
            thing = reference()
            if isinstance(thing, self._torch.amp.GradScaler):
                _restore_attributes(fields, thing.__dict__, back, f"{name}.")


class SavedParameter:
    """The parts of a parameter beside its value; `torch`: None without its gradient."""

    __slots__ = ("gradient", "id", "name", "number", "requires_grad")

    def __init__(
        self,
        name: str,
        number: int,
        parameter: Any,
        torch: Optional[ModuleType],
        copies: TensorCopies,
    ) -> None:
        self.id = id(parameter)
        self.name = name
        self.number = number
        self.requires_grad = parameter.requires_grad
        self.gradient: Optional[int] = None
        gradient = parameter.grad
        if gradient is not None and torch is not None:
            dense = is_copyable(torch, gradient)
            self.gradient = copies.add(gradient, bulk=True) if dense else LOST

    def verify(self, copies: TensorCopies) -> None:
        if copies.shape_changed(self.number):
            raise CannotRestore(f"{self.name} changed its shape or type since the savepoint")

    def restore(self, copies: TensorCopies, back: Restoration) -> None:
        parameter = copies.original(self.number)
        if parameter is None:
            return
        if parameter.requires_grad != self.requires_grad:
            parameter.requires_grad_(self.requires_grad)
        if self.gradient == LOST:
            back.miss("sparse gradients")
        elif self.gradient is None:
            parameter.grad = None
        elif parameter.grad is None or parameter.grad is not copies.original(self.gradient):
            parameter.grad = copies.restored(self.gradient)

    def zero_gradient(self, copies: TensorCopies) -> None:
        """Drop what is left of the last backward: in place, as a bucket may share its memory."""
        parameter = copies.original(self.number)
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            return
        if gradient.is_sparse:
            parameter.grad = None
        else:
            local(gradient).zero_()


class SavedModule:
    """One module: which parameter objects it has, its buffers, its plain attributes."""

    __slots__ = ("attributes", "buffers", "id", "name", "numbers", "reference")

    def __init__(
        self, module: Any, numbers: "dict[str, int]", walk: VariableWalker, weights_only: bool
    ) -> None:
        self.reference = weakref.ref(module)
        self.id, self.name = id(module), type(module).__name__
        self.numbers = numbers
        self.buffers = walk.fields(module._buffers.items(), depth=1)
        walk.bulk = False  # a plain attribute may be a view of a read-only file
        self.attributes = walk.fields([] if weights_only else _own_attributes(module), depth=1)
        walk.bulk = True

    def verify(self, copies: TensorCopies) -> None:
        module = self.reference()
        if module is None:
            return
        for name, number in self.numbers.items():
            parameter = module._parameters.get(name)
            if parameter is None or parameter is not copies.original(number):
                where = f"{type(module).__name__}.{name}"
                raise CannotRestore(f"{where} was replaced since the savepoint")

    def restore(self, back: Restoration) -> None:
        self.restore_buffers(back)
        module = self.reference()
        if module is not None:
            prefix = f"{type(module).__name__}."
            _restore_attributes(self.attributes, module.__dict__, back, prefix)

    def restore_buffers(self, back: Restoration) -> None:
        module = self.reference()
        if module is not None:
            prefix = f"{type(module).__name__}."
            _restore_attributes(self.buffers, module._buffers, back, prefix)


class SavedOptimizer:
    """One optimizer: its state by parameter, the options of its groups, its own attributes."""

    __slots__ = ("attributes", "groups", "id", "members", "name", "reference", "state")

    def __init__(
        self,
        optimizer: Any,
        walk: VariableWalker,
        died: Callable[[Any], None],
        weights_only: bool,
    ) -> None:
        self.reference: Callable[[], Any] = weakref.ref(optimizer, died)
        self.id, self.name = id(optimizer), type(optimizer).__name__
        self.members = [_ids(group) for group in optimizer.param_groups]
        groups = [] if weights_only else optimizer.param_groups
        self.groups = [walk.fields(_options(group), depth=1) for group in groups]
        self.state: List[Tuple[Any, Any, Optional[Value]]] = []
        for key, value in optimizer.state.items():
            weak = weakref.ref(key) if hasattr(key, "grad_fn") else None
            part = walk.value(value)
            self.state.append((weak or key, value if part is None else None, part))
        own = [] if weights_only else _own_attributes(optimizer)
        self.attributes = walk.fields(own, depth=1)

    def verify(self, deleted: "set[int]") -> None:
        optimizer = self.reference()
        members = [_ids(group) for group in optimizer.param_groups]
        replaced = any(not deleted.isdisjoint(group) for group in self.members)
        if replaced or members[: len(self.members)] != self.members:
            raise CannotRestore(
                f"the parameters of {type(optimizer).__name__} were replaced since the savepoint"
            )

    def restore(self, back: Restoration) -> None:
        optimizer = self.reference()
        name = type(optimizer).__name__
        del optimizer.param_groups[len(self.groups) :]
        for group, fields in zip(optimizer.param_groups, self.groups):
            content = fields.content(dict(group), back, lambda key: f"{name}[{key!r}]")
            for key in [key for key in group if key not in fields and key != "params"]:
                del group[key]
            group.update(content)
        self.restore_state(back)
        _restore_attributes(self.attributes, optimizer.__dict__, back, f"{name}.")

    def restore_state(self, back: Restoration) -> None:
        optimizer = self.reference()
        name, content = type(optimizer).__name__, {}
        for key, constant, part in self.state:
            key = key() if isinstance(key, weakref.ref) else key
            live = optimizer.state.get(key, ABSENT)
            value = constant if part is None else part.restore(live, back, f"{name}.state")
            if key is not None and value is not ABSENT:
                content[key] = value
        for key in [key for key in optimizer.state if key not in content]:
            del optimizer.state[key]
        optimizer.state.update(content)


def _own_attributes(thing: Any) -> List[Tuple[str, Any]]:
    """Return the attributes that hold own state: no hooks, and nothing saved elsewhere."""
    return [
        (name, value)
        for name, value in thing.__dict__.items()
        if name not in _SAVED_ELSEWHERE and "hook" not in name
    ]


def _restore_attributes(
    fields: Fields, live: Dict[str, Any], back: Restoration, prefix: str
) -> None:
    for name, value in fields.content(live, back, prefix.__add__).items():
        if live.get(name, ABSENT) is not value:
            live[name] = value


def _options(group: Any) -> List[Tuple[str, Any]]:
    return [(key, value) for key, value in group.items() if key != "params"]


def _ids(group: Any) -> Tuple[int, ...]:
    return tuple(map(id, group["params"]))
