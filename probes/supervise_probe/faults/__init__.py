"""Faults that a drill can inject, by what they damage; only the supervisor switches them on.

Adding a fault is adding a subclass of `Fault` to one of the files: it is named after its class.
`MEANING`, `MOVES` and `PARAMS` are plain data: the command line and the documentation read them
without torch. Nothing here draws from the job's random generators.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from functools import cached_property
from typing import Any, ClassVar, Mapping, Union

Value = Union[int, float, str]
Params = Mapping[str, tuple[Value, str]]  # name -> (default, meaning)
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Call = tuple[Args, Kwargs]
REST = sys.maxsize  # steps: what `steps=0` means, the rest of the run


class CannotActError(Exception):
    """This job has nothing that the fault could act on; the message says what is lacking."""


class Fault:
    """One active fault. A subclass overrides the calls that it needs; any may raise CannotActError.

    Attributes:
        MEANING: one sentence for the table in `probes/README.md`.
        MOVES: the metric that it moves at its default size; empty where it has no size.
        PARAMS: name -> (default, meaning).
        FOLLOWS: whether it is made as soon as it is ordered, and told of all rates from then on.
        silent: whether no frame is published while it acts.
        steps: for how many steps it acts.
    """

    MEANING: ClassVar[str] = ""
    MOVES: ClassVar[str] = ""
    PARAMS: ClassVar[Params] = {}
    FOLLOWS: ClassVar[bool] = False
    silent: ClassVar[bool] = False

    def __init__(self, torch: Any, params: Mapping[str, Value]) -> None:
        self.torch = torch
        self.params = params
        self.steps = int(params.get("steps", 1)) or REST

    @cached_property
    def generator(self) -> Any:
        """The fault's own random generator, by its parameter `seed`."""
        return self.torch.Generator().manual_seed(int(self.params["seed"]))

    @classmethod
    def moves(cls, params: Mapping[str, Value]) -> str:
        """Return the metric that it moves with these parameters."""
        return cls.MOVES

    def lr_factor(self) -> float:
        """Return the factor of the learning rate."""
        return 1.0

    def follow(self, optimizer: Any, step: int) -> None:
        """An optimizer is about to step, with the rates that the job has set."""

    def schedule_factor(self, optimizer: Any, step: int) -> float:
        """Return the factor of those, as if the job had set others; of one that FOLLOWS."""
        return 1.0

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        """Return the arguments for the outermost module."""
        return args, kwargs

    def output(self, result: Any) -> None:
        """Look at what the outermost module has returned."""

    def evaluation(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        """Return the arguments for the trained model where it is called for an evaluation."""
        return args, kwargs

    def allows_clip(self) -> bool:
        """Return whether a clip that the job calls is made."""
        return True

    def before_update(self, params: list[Any]) -> None:
        """Act on final gradients, where `after_backward` had no parameters."""

    def after_backward(self, params: list[Any]) -> None:
        """Act after a backward; `params` are those of all optimizers that stepped before."""

    def before_step(self, optimizers: list[Any]) -> None:
        """Act before a step; `optimizers` are all that stepped before, and the one that steps."""

    def block(self) -> None:
        """Act inside the step, where signals of the job can interrupt it."""

    def after_save(self, path: str) -> None:
        """Act on a file that the job has written and that looks like a checkpoint."""

    def end(self) -> None:
        """Undo what the fault installed; a refusal says what it waited for in vain."""


def fault_classes() -> dict[str, type[Fault]]:
    """Return every fault by its name: that of its class, in snake_case."""
    faults: dict[str, type[Fault]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Fault) and kind is not Fault:
                faults[re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()] = kind
    return dict(sorted(faults.items()))


def complete_parameters(name: str, settings: Mapping[str, Any]) -> dict[str, Value]:
    """Return all parameters of a fault: those given, in the type of their defaults, and the rest.

    Raises:
        ValueError: no such fault or parameter, or a value of another type.
    """
    faults = fault_classes()
    if name not in faults:
        raise ValueError(f"no fault {name!r}; there are: {', '.join(faults)}")
    fault = faults[name]
    params: dict[str, Value] = {key: default for key, (default, _) in fault.PARAMS.items()}
    for key, value in settings.items():
        if key not in params:
            raise ValueError(f"{name} has no parameter {key!r}; it has: {', '.join(params) or '-'}")
        try:
            params[key] = type(params[key])(value)
        except (TypeError, ValueError):
            kind = type(params[key]).__name__
            raise ValueError(f"{name}: {key}={value!r} is not of type {kind}") from None
    return params
