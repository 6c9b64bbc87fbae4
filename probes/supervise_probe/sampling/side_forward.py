"""Two rows of a step's first input, run once more through the module that the job trains.

The run is eager and without gradients, under the autocast of the job's own forward, with all
modules in the mode (train or eval) in which they were when the input was kept. It leaves no trace:
every source of chance and the Python state of all modules are put back, and clones stand in for
their tensors (`forward_inputs.py`); torch is set to run compiled code eagerly meanwhile, so that
nothing is compiled and no guard is looked at. A `fixed` run is the same each time but for the
weights: chance begins at SEED.

Refused, with the reason, where that cannot be kept: several ranks, whose collectives would wait for
each other, except for a replica that calls none (`runnable_module`); hooks of the job's own; inputs
that are no tensors; buffers too large to keep a copy of; a forward that changes weights or counts
something, which a trial finds out. What a forward changes outside of its modules is not put back,
but for the generators that it draws from.

Tensors that a forward must leave alone, the weights above all, are compared. The first time copies
are kept on the host, and bits compared; behind a forward that has proved to change nothing it is
enough to look at where the memory of each is, and at torch's count of writes.
"""

from __future__ import annotations

import math
import sys
import weakref
from contextlib import contextmanager, nullcontext
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ContextManager,
    Iterable,
    Iterator,
    NamedTuple,
    Optional,
)

from ..runtime.guard import describe_error, is_from_signal_handler
from ..torch_state.structure import nested_leaves
from ..torch_state.tensor_copies import same_bits
from . import forward_inputs
from .forward_inputs import ModuleState, NeverError, RefusedError, TypeClasses, try_put_back

if TYPE_CHECKING:
    from ..context import ProbeContext
    from .forward_inputs import TypeClasses

COPIED_BYTES = 1 << 30  # of copies
# An argument of the Trainer of transformers: the targets of all rows on all ranks, which a model
# divides its loss by. Without it that is the mean over the rows that are here.
OF_ALL_ROWS = "num_items_in_batch"


class _Copy(NamedTuple):
    """One tensor with an alias of its memory, a copy on the host, and its gradient."""

    tensor: Any
    alias: Any
    copy: Any
    gradient: Any


class Weights:
    """These tensors, as they are now.

    Args:
        copies: keep copies as well, and put gradients aside.

    Raises:
        NeverError: they are too many to be copied.
    """

    def __init__(self, torch: Any, tensors: Iterable[Any], copies: bool) -> None:
        self._torch = torch
        self._marks = [(tensor, _mark(tensor)) for tensor in tensors]
        self._copies: list[_Copy] = []
        if not copies:
            return
        total = sum(t.numel() * t.element_size() for t, _ in self._marks)
        if total > COPIED_BYTES:
            raise NeverError(
                f"the parameters have {total >> 20} MB, and whether a forward changes them is "
                f"tried with {COPIED_BYTES >> 20} MB at most"
            )
        for tensor, _ in self._marks:
            alias = tensor.data
            gradient = tensor.grad if tensor.is_leaf else None
            self._copies.append(_Copy(tensor, alias, alias.to("cpu", copy=True), gradient))

    def detach_gradients(self) -> None:
        """The forward is about to run; one that computes gradients finds none to add to."""
        for copy in self._copies:
            if copy.gradient is not None:
                copy.tensor.grad = None

    def restore_if_changed(self) -> bool:
        """Put back what can be, in any case the rest; whether anything had changed."""
        changed = [try_put_back("failed", self._put_back, copy) for copy in self._copies]
        changed += [try_put_back("failed", _differs, *mark) for mark in self._marks]
        return any(changed)

    def _put_back(self, original: _Copy) -> bool:
        tensor, alias, changed = original.tensor, original.alias, False
        if tensor.is_leaf and tensor.grad is not None:
            changed = True
        if original.gradient is not None or changed:
            tensor.grad = original.gradient
        if _address(tensor) != _address(alias):
            changed, tensor.data = True, alias
        copy = original.copy if alias.device.type == "cpu" else original.copy.to(alias.device)
        if not same_bits(self._torch, alias, copy):
            changed = True
            if alias.shape == copy.shape:
                alias.copy_(copy)
        return changed


def _address(tensor: Any) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _mark(tensor: Any) -> tuple[Any, ...]:
    """What shows most changes of a tensor, without looking into it."""
    version = -1 if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), version, tensor.requires_grad, tensor.shape)


def _differs(tensor: Any, mark: tuple[Any, ...]) -> bool:
    return _mark(tensor) != mark


__all__ = [
    "Inputs",
    "NeverError",
    "RefusedError",
    "check_runnable",
    "keep_first_rows",
    "map_tensors",
    "run_forward",
]

SEQUENCES = 2
MOST_BYTES = 64 << 20  # of inputs
SEED = 20220405
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_ARITHMETIC = frozenset(("aten", "prim", "prims", "quantized"))  # namespaces of operators
_SIMPLE = (type(None), bool, int, float, str)


class Inputs(NamedTuple):
    """What a forward was given, and under what it ran.

    Attributes:
        device: type of the first tensor's. autocast: whether it was on there. dtype: of it.
        modes: `training` of all modules, in order.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: str
    autocast: bool
    dtype: Any
    modes: tuple[bool, ...]

    def values(self) -> tuple[Any, ...]:
        """Return all inputs in order."""
        return (*self.args, *self.kwargs.values())


def keep_first_rows(
    context: ProbeContext,
    root: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rows: int = SEQUENCES,
    most_bytes: int = MOST_BYTES,
) -> Inputs:
    """Keep the first rows of these inputs.

    Raises:
        RefusedError: they cannot be kept.
    """
    torch = context.torch
    leading = next((v for v in nested_leaves((args, kwargs)) if isinstance(v, torch.Tensor)), None)
    if leading is None or not leading.dim():
        raise RefusedError("the model takes no batch")
    if not hasattr(torch, "get_autocast_dtype"):
        raise RefusedError(f"torch {torch.__version__} does not expose its autocast state")
    device = leading.device.type
    # One sample's features are no rows; whole numbers are, of a batch or of a sequence.
    is_sample = leading.dim() == 1 and leading.is_floating_point()
    cut = _Cut(torch, -1 if is_sample else int(leading.shape[0]), rows, most_bytes)
    return Inputs(
        cut.cut(args),
        cut.cut({name: value for name, value in kwargs.items() if name != OF_ALL_ROWS}),
        device,
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        tuple(module.training for module in root.modules()),
    )


def runnable_module(context: ProbeContext, root: Any) -> Any:
    """Return the module that one rank of a job can run alone, for a forward of our own.

    With one rank that is `root`. Of several it is the module in a DistributedDataParallel of all of
    them, which only the wrapper lets talk to the others; `run_forward` ends one that does.

    Raises:
        RefusedError: there is none.
    """
    torch, ranks = context.torch, context.position.world_size
    if ranks < 2:
        return root
    ddp = getattr(torch.nn.parallel, "DistributedDataParallel", None)
    if ddp is None or type(root) is not ddp or root.process_group.size() != ranks:
        raise RefusedError(
            f"one of {ranks} ranks cannot run the model alone: it is not in one "
            "DistributedDataParallel of all"
        )
    return root.module


def run_forward(
    context: ProbeContext,
    root: Any,
    inputs: Inputs,
    kinds: TypeClasses,
    *,
    watch: Optional[ContextManager[None]] = None,
    fixed: bool = False,
    trial: bool = False,
    take: Callable[[Any], Any] = lambda output: output,
) -> list[Any]:
    """Run the original of `root` on what was kept.

    Args:
        watch: looks on. fixed: see above.
        trial: run it twice, from one to the next with whatever tensors it left behind, and compare
            all weights bit for bit.
        take: what is wanted of an output, while its tensors are still there.

    Returns:
        What `take` gave for each output.

    Raises:
        RefusedError: the modules have come or gone since, or cannot be kept.
        NeverError: it changed what it must not; this was put back as far as it is known.
    """
    torch = context.torch
    original = root._modules.get("_orig_mod")
    call = original if original is not None else root._call_impl
    batches: list[Any] = []
    with _undone(context, root, inputs, kinds, trial) as state:
        autocast = torch.autocast(
            device_type=inputs.device,
            dtype=inputs.dtype,
            enabled=inputs.autocast,
            cache_enabled=False,
        )
        for _ in range(2 if trial else 1):
            if fixed:
                forward_inputs.seed_all(torch, SEED)
                state.seed(SEED)
            args, kwargs = map_tensors(torch, (inputs.args, inputs.kwargs), torch.clone)
            with autocast, watch or nullcontext(), refuse_collectives(context):
                output = call(*args, **kwargs)
            batches.append(take(output))
    return batches


@contextmanager
def _undone(
    context: ProbeContext, root: Any, inputs: Inputs, kinds: TypeClasses, trial: bool
) -> Iterator[ModuleState]:
    """Where a forward leaves no trace; raises as `run_forward` does."""
    torch = context.torch
    state = ModuleState(torch, root, kinds)
    if len(state.modules) != len(inputs.modes):
        raise RefusedError("modules of the model have come or gone since")
    tensors = (*state.weights.values(), *state.tensors.values())
    weights = Weights(torch, tensors, copies=trial)
    chance = forward_inputs.capture_random_states(torch)
    gate = context.gate
    gate.in_forward, inside = True, gate.in_forward
    enabled = torch.is_grad_enabled()
    try:
        with torch.no_grad(), _eagerly(torch):
            weights.detach_gradients()
            state.set_modes(inputs.modes)
            yield state
    finally:
        gate.in_forward = inside
        torch._C._set_grad_enabled(False)
        changed = state.restore_and_name_change()
        moved = weights.restore_if_changed()
        lost = [
            try_put_back(generator.name, forward_inputs.restore_random_state, [generator])
            for generator in chance
        ]
        torch._C._set_grad_enabled(enabled)
    changed = changed or ("its weights" if moved else next(filter(None, lost), ""))
    if changed:
        raise NeverError(f"a forward of the model changes {changed}")


def check_runnable(
    context: ProbeContext, root: Any, compiled: bool, *, alone: bool = False
) -> None:
    """Look whether `root` can be run once more.

    Args:
        compiled: it is, or something in it.
        alone: it is a `runnable_module`.

    Raises:
        RefusedError: it cannot.
    """
    torch = context.torch
    if compiled and not hasattr(getattr(torch, "compiler", None), "set_stance"):
        raise RefusedError(
            f"torch {torch.__version__} cannot run compiled code eagerly for a while"
        )
    if _ranks(context) > 1 and (compiled or not alone):
        raise RefusedError("a model with several ranks is not run once more")
    if torch.is_inference_mode_enabled():
        raise RefusedError("what a forward keeps in inference mode cannot be trained with")
    if any(isinstance(module, torch.jit.ScriptModule) for module in root.modules()):
        raise RefusedError("the model is a script")
    _check_hooks(torch, root)
    devices = {p.device.type for p in root.parameters()}
    if not devices <= {"cpu", "cuda"}:
        raise RefusedError(f"the model is on {', '.join(sorted(devices))}")
    if any(hasattr(p, "_local_tensor") for p in root.parameters()):
        raise RefusedError("the parameters are sharded")


def _ranks(context: ProbeContext) -> int:
    distributed = getattr(context.torch, "distributed", None)
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return context.position.world_size
    return max(context.position.world_size, int(distributed.get_world_size()))


def refuse_collectives(context: ProbeContext) -> ContextManager[Any]:
    """Where an operator that waits for other ranks is refused before it does.

    Collectives are operators of torch, and those of other libraries are not known: any that is not
    torch's own arithmetic counts.
    """
    if _ranks(context) < 2:
        return nullcontext()
    mode: Any = context.torch.utils._python_dispatch.TorchDispatchMode

    class Alone(mode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func.namespace not in _ARITHMETIC:
                raise NeverError(f"its forward calls {func.name()}, which may wait for other ranks")
            return func(*args, **(kwargs or {}))

    return Alone()


def _check_hooks(torch: Any, root: Any) -> None:
    everywhere = torch.nn.modules.module
    tables = [getattr(everywhere, f"_global{name}", {}) for name in _HOOKS]
    tables += [getattr(module, name, {}) for module in root.modules() for name in _HOOKS]
    for hook in (hook for table in tables for hook in table.values()):
        if not (getattr(hook, "__module__", None) or "").startswith("torch."):
            raise RefusedError("the job has forward hooks of its own")


def _eagerly(torch: Any) -> Any:
    """Where the compiler is not even loaded, nothing was compiled; asking it would load it."""
    stance = getattr(getattr(torch, "compiler", None), "set_stance", None)
    if stance is None or "torch._dynamo" not in sys.modules:
        return nullcontext()
    return stance("force_eager")


def map_tensors(torch: Any, value: Any, function: Callable[[Any], Any]) -> Any:
    """Return nested tuples, lists and dicts with `function` of each tensor in its place."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(torch, item, function) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(torch, item, function) for item in value)
    return value


class _Cut:
    """Copies inputs, the first rows of those that have the batch in front, or behind the layers
    of a recurrent state."""

    def __init__(self, torch: Any, batch: int, rows: int, most_bytes: int) -> None:
        self._torch = torch
        self._rows, self._most_bytes = rows, most_bytes
        self._batch = batch
        self._bytes = 0

    def cut(self, value: Any) -> Any:
        """Return a copy that the job cannot change.

        Raises:
            RefusedError: it is neither a plain tensor nor a plain value, or too large.
        """
        if type(value) is self._torch.Tensor:
            value = value.detach()
            if value.dim() and value.shape[0] == self._batch:
                value = value[: self._rows]
            elif value.dim() > 2 and value.shape[1] == self._batch:
                value = value[:, : self._rows]
            self._bytes += value.numel() * value.element_size()
            if self._bytes > self._most_bytes:
                raise RefusedError("the input is too large to keep")
            return value.clone()
        if type(value) in (tuple, list):
            return type(value)(self.cut(item) for item in value)
        if type(value) is dict:
            return {key: self.cut(item) for key, item in value.items()}
        if isinstance(value, (*_SIMPLE, self._torch.dtype, self._torch.device)):
            return value
        raise RefusedError(f"the model takes a {type(value).__name__}")


SAME = 1e-6  # relative; project default, as among ranks
PIECE = 1 << 20  # elements that are squared at a time

_Key = tuple[int, tuple[bool, ...]]


class Trials:
    """The trials of one process.

    Attributes:
        kinds: what values are, remembered by their types.
    """

    def __init__(self, context: ProbeContext) -> None:
        self._context, self._torch = context, context.torch
        self.kinds = TypeClasses(context.torch)
        self._never: dict[int, tuple[Any, str]] = {}
        self._passed: dict[_Key, tuple[Any, bool]] = {}

    def raise_if_refused(self, root: Any) -> None:
        """Look whether `root` was refused.

        Raises:
            NeverError: it was.
        """
        reason = self._never.get(id(root))
        if reason is not None and reason[0]() is root:
            raise NeverError(reason[1])

    def never(self, root: Any, reason: str) -> None:
        """Refuse `root` for good."""
        self._never[id(root)] = weakref.ref(root), reason

    def output_drifts(self, root: Any, inputs: Inputs) -> bool:
        """Try `root` in the modes of these inputs, if that was not yet done.

        Returns:
            Whether a forward changes what the next one gives.

        Raises:
            RefusedError: it cannot be run, or not now.
        """
        self.raise_if_refused(root)
        key = id(root), inputs.modes
        passed = self._passed.get(key)
        if passed is not None and passed[0]() is root:
            return passed[1]
        try:
            values = self.run(root, inputs, fixed=True, trial=True, take=self._value)
        except RefusedError:
            raise
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            reason = f"one more forward of it failed: {describe_error(error)}"
            self.never(root, reason)
            raise NeverError(reason) from error
        value, second = (None if v is None else float(v) for v in values)
        drifts = value is not None and second is not None and not is_close(value, second, SAME)
        self._passed[key] = weakref.ref(root), drifts
        return drifts

    def run(self, root: Any, inputs: Inputs, **options: Any) -> list[Any]:
        """As `side.run`; what is refused for good there is remembered."""
        try:
            return run_forward(self._context, root, inputs, self.kinds, **options)
        except NeverError as refusal:
            self.never(root, str(refusal))
            raise

    def _value(self, output: Any) -> Optional[Any]:
        return output_value(self._torch, output) if floating_tensors(self._torch, output) else None


def floating_tensors(torch: Any, output: Any) -> list[Any]:
    """Return the floating tensors that a model's output holds."""
    several = [v for v in nested_leaves(output) if isinstance(v, torch.Tensor)]
    return [v.detach() for v in several if v.is_floating_point() and v.numel()]


def output_value(torch: Any, output: Any) -> Any:
    """Return what a model's output comes to, as a tensor of one float64: the loss where it holds a
    floating tensor of one element, else the mean of the squares of the first floating tensor.

    Raises:
        RefusedError: it holds no floating tensor.
    """
    several = floating_tensors(torch, output)
    loss = next((v for v in several if v.numel() == 1), None)
    if loss is not None:
        return loss.double().reshape(())
    if not several:
        raise RefusedError("the model's output holds no floating tensor")
    pieces = several[0].flatten().split(PIECE)
    return sum(piece.double().square().sum() for piece in pieces) / several[0].numel()


def is_close(was: float, now: float, close: float) -> bool:
    """Whether two values agree within `close`, relative; NaN agrees with NaN."""
    if was == now or (was != was and now != now):
        return True
    return math.isfinite(was) and math.isfinite(now) and abs(was - now) <= close * abs(was)
