"""Two rows of a step's first input, run once more through the module that was compiled.

The run is eager, without gradients, under the autocast of the step's own forward, with the weights
that the step's own forward had, since the optimizer has not stepped yet. It leaves no trace: every
source of chance, all buffers, and the simple attributes of all modules are put back; torch is told
to run compiled code eagerly meanwhile, so that nothing is compiled and no guard is looked at.

Refused, with the reason, where that cannot be kept: several ranks, whose collectives would wait for
each other; hooks of the job's own; inputs that are no tensors; buffers too large to keep a copy of.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Tuple

from .. import rng
from .structure import Structure, leaves

if TYPE_CHECKING:
    from ..probe import Probe
    from .watch import Watch

ROWS = 2
MOST_BYTES = 64 << 20  # of buffers, and of inputs
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_SIMPLE = (type(None), bool, int, float, str)
_CONTAINERS = (list, dict, set, deque)


class Kept(NamedTuple):
    """What a side run needs.

    Attributes:
        call: the original module, or its uncompiled call. root: the compiled one.
        device: its type. autocast: whether it was on in the step's forward. dtype: of it.
    """

    root: Any
    call: Callable[..., Any]
    structure: Structure
    due: FrozenSet[str]
    args: Tuple[Any, ...]
    kwargs: Dict[str, Any]
    device: str
    autocast: bool
    dtype: Any

    def inputs(self) -> Tuple[Any, ...]:
        """Return all of them in order."""
        return (*self.args, *self.kwargs.values())


class RefusedError(Exception):
    """The side path cannot be taken; the message says why."""


def keep(
    probe: Probe,
    root: Any,
    compiled: bool,
    structure: Structure,
    due: FrozenSet[str],
    args: Tuple[Any, ...],
    kwargs: Dict[str, Any],
) -> Tuple[str, Optional[Kept]]:
    """Keep two rows of these inputs. Returns why not, and None, where that must not be."""
    torch = probe.torch
    try:
        _check(probe, root)
        original = root._modules.get("_orig_mod")
        call = original if original is not None else root._call_impl
        first = next((v for v in leaves((args, kwargs)) if isinstance(v, torch.Tensor)), None)
        if first is None or not first.dim():
            raise RefusedError("the model takes no batch")
        device = first.device.type
        batch = int(first.shape[0])
        held = _Cut(torch, batch)
        return "", Kept(
            root,
            call,
            structure,
            due,
            held.cut(args),
            held.cut(kwargs),
            device,
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
        )
    except RefusedError as refusal:
        return str(refusal), None


def run(probe: Probe, kept: Kept, watch: Watch) -> Any:
    """Run the original module on what was kept, watched; return its output."""
    torch = probe.torch
    modules = list(kept.root.modules())
    saved = [_Saved(torch, module) for module in modules]
    chance = rng.global_states(torch)
    probe.in_forward, inside = True, probe.in_forward
    enabled = torch.is_grad_enabled()
    try:
        autocast = torch.autocast(
            device_type=kept.device, dtype=kept.dtype, enabled=kept.autocast, cache_enabled=False
        )
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), autocast:
            watch.start()
            try:
                return kept.call(*kept.args, **kept.kwargs)
            finally:
                watch.stop()
    finally:
        probe.in_forward = inside
        rng.restore(chance)
        for each in saved:
            each.restore()
        probe._set_grad_enabled(enabled)


def _check(probe: Probe, root: Any) -> None:
    torch = probe.torch
    if not hasattr(getattr(torch, "compiler", None), "set_stance"):
        raise RefusedError(
            f"torch {torch.__version__} cannot run compiled code eagerly for a while"
        )
    distributed = getattr(torch, "distributed", None)
    if probe.world_size > 1 or (
        distributed is not None
        and distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    ):
        raise RefusedError("a compiled model with several ranks is not run once more")
    total = 0
    for module in root.modules():
        for name in _HOOKS:
            for hook in getattr(module, name, {}).values():
                home = getattr(hook, "__module__", None) or ""
                if not home.startswith("torch."):
                    raise RefusedError("the job has forward hooks of its own")
        for buffer in module._buffers.values():
            if buffer is not None:
                total += buffer.numel() * buffer.element_size()
    if total > MOST_BYTES:
        raise RefusedError(f"the buffers have {total >> 20} MB")
    devices = {p.device.type for p in root.parameters()}
    if not devices <= {"cpu", "cuda"}:
        raise RefusedError(f"the model is on {', '.join(sorted(devices))}")
    if any(hasattr(p, "_local_tensor") for p in root.parameters()):
        raise RefusedError("the parameters are sharded")


class _Cut:
    """Copies inputs, the first rows of those that have the batch in front."""

    def __init__(self, torch: Any, batch: int) -> None:
        self._torch = torch
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
                value = value[:ROWS]
            self._bytes += value.numel() * value.element_size()
            if self._bytes > MOST_BYTES:
                raise RefusedError("the input is too large to keep")
            return value.clone()
        if type(value) in (tuple, list):
            return type(value)(self.cut(item) for item in value)
        if type(value) is dict:
            return {key: self.cut(item) for key, item in value.items()}
        if isinstance(value, (*_SIMPLE, self._torch.dtype, self._torch.device)):
            return value
        raise RefusedError(f"the model takes a {type(value).__name__}")


class _Saved:
    """One module's buffers and attributes; containers to the depth of one."""

    def __init__(self, torch: Any, module: Any) -> None:
        self._module = module
        self._attributes = dict(vars(module))
        self._contents: List[Tuple[Any, Any]] = []
        for value in self._attributes.values():
            if type(value) in _CONTAINERS:
                self._contents.append((value, value.copy()))
        self._buffers = [(b, b.clone()) for b in module._buffers.values() if _here(b)]
        kinds = rng.generator_types(torch)
        self._chance = [
            (value, rng.state_of(value))
            for value in self._attributes.values()
            if isinstance(value, kinds)
        ]

    def restore(self) -> None:
        """Put everything back that is not as it was."""
        mine = vars(self._module)
        for name in [name for name in mine if name not in self._attributes]:
            del mine[name]
        for name, value in self._attributes.items():
            if mine.get(name) is not value or name not in mine:
                mine[name] = value
        for container, content in self._contents:
            if not _same(container, content):
                container.clear()
                if isinstance(container, (set, dict)):
                    container.update(content)
                else:
                    container.extend(content)
        for buffer, copy in self._buffers:
            buffer.data.copy_(copy)  # `.data`: a graph that is kept must not see a new version
        for generator, state in self._chance:
            rng.set_state_of(generator, state)


def _here(buffer: Any) -> bool:
    return buffer is not None and not buffer.is_meta


def _same(container: Any, content: Any) -> bool:
    """Whether a container holds the very objects of its copy, without comparing any of them."""
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        pairs = zip(container.items(), content.items())
        return all(a is c and b is d for (a, b), (c, d) in pairs)
    if isinstance(container, set):
        return {id(item) for item in container} == {id(item) for item in content}
    return all(a is b for a, b in zip(container, content))
