"""A checkpoint in the job's own format, at any step, on command.

The layout is learned from a checkpoint that the job saved, as is the place in its
loop where it can be saved (`save_site.py`): the file is written when the job next reaches it, in
the loop iteration of the step after which it was ordered. It is written beside the job's own, under
another name. A library that runs the loop writes it itself.

Under DDP rank 0 alone writes, as the job does. Sharded state is refused: no rank has all of it.

In a layout each entry is matched with its source: the `state_dict()` of a module, an optimizer, a
schedule or a scaler; one parameter or buffer; a generator's state; the count of steps; a variable
of the job; a literal in its code. An entry without a source makes the layout unusable, and is
named. No object is copied: modules and optimizers are referenced weakly, variables by name.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import OrderedDict
from time import monotonic_ns
from types import FrameType
from typing import TYPE_CHECKING, Any, Callable, Iterator, NamedTuple, Optional

from ..context import Refused
from ..runtime import files
from ..runtime.call_stack import CannotRestore, job_frames
from ..runtime.guard import describe_error
from ..torch_state.registry import Registry
from . import save_site
from .save_site import MISSING, PLAIN, JobVariables, Name

if TYPE_CHECKING:
    from ..collectors.progress import FrameworkCollector
    from ..context import ProbeContext
    from .resume import SaveReports

DEPTH = 8
TRIES = 3  # to learn a layout with the same keys; project default
_SHORT = 60  # characters of an entry's path in a sentence

Stale = Callable[[Name, bool], bool]  # (name, whether it is a container): it is out of date


class Sources(NamedTuple):
    """What a layout is built from."""

    variables: JobVariables
    stale: Stale
    steps: int


Builder = Callable[[Sources], Any]


class Layout(NamedTuple):
    """How to build one entry, and all that is in it.

    Attributes:
        build: returns its present value; raises Refused.
        alive: whether it holds state that every save computes: no variable holds it.
        kinds: what state dicts are in it: "module", "optimizer".
    """

    build: Builder
    alive: bool
    kinds: set[str]


class Learner:
    """Matches one checkpoint while it is saved."""

    def __init__(self, torch: Any, registry: Registry, variables: JobVariables, steps: int) -> None:
        self._torch = torch
        self._registry = registry
        self._variables = variables
        self._steps = steps
        self._members: Optional[dict[Any, tuple[Any, str, str]]] = None
        self._generators = [(read, read()) for read in _generators(torch)]
        generators = variables.generators(torch.Generator)
        self._own_generators = [(name, generator.get_state()) for name, generator in generators]

    def learn(self, content: Any) -> Layout:
        """Return the layout of what the job saved.

        Raises:
            Refused: an object has no source, as a copy of a tensor has none: no layout is usable.
        """
        return self._entry("", "", content, 0, False)

    def _entry(self, path: str, key: str, value: Any, depth: int, in_container: bool) -> Layout:
        """`in_container`: whether a variable holds a container that the value is in."""
        if isinstance(value, self._torch.Tensor):
            return self._tensor(path, value, in_container)
        generator = self._generator(value) if isinstance(value, (dict, list, tuple)) else None
        if generator is not None:
            return Layout(generator, True, set())
        if isinstance(value, dict):
            state_dict = self._state_dict(value)
            if state_dict is not None:
                kind, owner = state_dict
                return Layout(state_dict_builder(path, weakref.ref(owner)), True, {kind})
        if type(value) in (dict, OrderedDict, list, tuple) and depth < DEPTH:
            return self._container(path, value, depth, in_container)
        if type(value) in PLAIN:
            return Layout(self._plain(path, key, value), False, set())
        return self._variable(path, value, in_container)

    def _variable(self, path: str, value: Any, in_container: bool) -> Layout:
        holders = self._variables.holders(value)
        if not (holders or in_container):
            raise Refused(_unknown(path))
        return Layout(variable_or_default_builder(holders, unknown_builder(path)), False, set())

    def _container(self, path: str, value: Any, depth: int, in_container: bool) -> Layout:
        # The whole is made for this save. As it has state that every save computes, it is built.
        holders = self._variables.holders(value) if depth else []
        in_container = in_container or bool(holders)
        pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
        kind = type(value)
        keys = [key for key, _ in pairs]
        dot = "." if path else ""
        parts = [
            self._entry(f"{path}{dot}{k}", str(k), item, depth + 1, in_container)
            for k, item in pairs
        ]

        def build(now: Sources) -> Any:
            built = [part.build(now) for part in parts]
            return kind(zip(keys, built)) if issubclass(kind, dict) else kind(built)

        alive = any(part.alive for part in parts)
        kinds: set[str] = set().union(*(part.kinds for part in parts))
        return Layout(variable_or_default_builder([] if alive else holders, build), alive, kinds)

    # ── sources of a value ───────────────────────────────────────────────────────────────────

    def _tensor(self, path: str, tensor: Any, in_container: bool) -> Layout:
        generator = self._generator(tensor)
        if generator is not None:
            return Layout(generator, True, set())
        if tensor.numel():
            if self._members is None:
                self._members = self._index_members()
            member = self._members.get(_memory(tensor))
            if member is not None:
                return Layout(member_builder(path, *member), True, {"module"})
        return self._variable(path, tensor, in_container)

    def _index_members(self) -> dict[Any, tuple[Any, str, str]]:
        """Return module, table and name of all parameters and buffers, by their memory."""
        members: dict[Any, tuple[Any, str, str]] = {}
        for module in self._registry.modules:
            for table in ("_parameters", "_buffers"):
                for name, member in getattr(module, table).items():
                    if member is not None and (key := _memory(member)):
                        members.setdefault(key, (weakref.ref(module), table, name))
        return members

    def _generator(self, value: Any) -> Optional[Builder]:
        for read, state in self._generators:
            if is_equal(self._torch, state, value):
                return lambda now: read()
        for name, state in self._own_generators:
            if is_equal(self._torch, state, value):
                return lambda now: now.variables.get(name).get_state()
        return None

    def _state_dict(self, value: dict[Any, Any]) -> Optional[tuple[str, Any]]:
        """Return kind and object whose state dict this is; None unless it is unambiguous."""
        registry = self._registry
        if "state" in value and "param_groups" in value:
            kind, several = "optimizer", list(registry.optimizers)
        elif any(isinstance(item, self._torch.Tensor) for item in value.values()):
            kind, several = "module", [m for m in registry.modules if _contains(m, value)]
        else:
            kind, several = "other", [*registry.schedulers, *registry.scalers]
        pairs = [
            (_shared(owner, value), owner)
            for owner in several
            if is_equal(self._torch, owner.state_dict(), value)
        ]
        best = max((shared for shared, _ in pairs), default=-1)
        owners = [owner for shared, owner in pairs if shared == best]
        if len(owners) == 1 or (owners and kind == "module"):
            return kind, owners[0]
        return None

    def _plain(self, path: str, key: str, value: Any) -> Builder:
        """A literal may equal a count by accident, so an unnamed int counts as no literal."""
        names = self._variables.variables_with_value(key, value)
        counts = type(value) is int and value == self._steps
        literal = any(
            type(constant) is type(value) and constant == value
            for constant in self._variables.constants
        )
        if names:
            return variable_builder(path, names, count_steps if counts else unknown_builder(path))
        if counts and not literal:
            return count_steps
        if literal and type(value) is str and not self._variables.has(key):
            return lambda now: value
        reason = f": no variable named {key!r} held the same when it was saved"
        if type(value) is int:
            reason += f", nor was that the number of steps, {self._steps}"
        return unknown_builder(path, reason)


def is_equal(torch: Any, a: Any, b: Any) -> bool:
    """Whether two values are equal, tensors bit by bit."""
    if a is b:
        return True
    if type(a) is not type(b) and not (isinstance(a, dict) and isinstance(b, dict)):
        return False
    if isinstance(a, torch.Tensor):
        return _same_memory(a, b) or (a.device == b.device and bool(torch.equal(a, b)))
    if isinstance(a, dict):
        return list(a) == list(b) and all(is_equal(torch, a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(is_equal(torch, x, y) for x, y in zip(a, b))
    if hasattr(a, "tobytes"):
        return bool(a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b)


def _same_memory(a: Any, b: Any) -> bool:
    return bool(a.data_ptr() == b.data_ptr() and _kind(a) == _kind(b))


def _memory(tensor: Any) -> Any:
    """Return what only tensors with the same memory have in common, None for one without any."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a sparse one, or one of a class that holds its values elsewhere
        return None
    return (address, *_kind(tensor)) if address else None


def _kind(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def nested_containers(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the dicts, lists and tuples of a checkpoint."""
    if isinstance(value, (dict, list, tuple)) and depth < DEPTH:
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from nested_containers(item, depth + 1)


def _generators(torch: Any) -> Iterator[Callable[[], Any]]:
    """Yield functions that read the states of the generators in use."""
    yield torch.get_rng_state
    if torch.cuda.is_initialized():
        yield torch.cuda.get_rng_state
        yield torch.cuda.get_rng_state_all
    for module, name in (("numpy.random", "get_state"), ("random", "getstate")):
        if module in sys.modules:
            yield getattr(sys.modules[module], name)


def _contains(module: Any, value: dict[Any, Any]) -> bool:
    """Whether the key of the first tensor of a state dict leads to it from this module."""
    for key, tensor in value.items():
        if not isinstance(key, str) or not hasattr(tensor, "data_ptr"):
            continue
        *way, leaf = key.split(".")
        for name in way:
            module = module._modules.get(name)
            if module is None:
                return False
        member = module._parameters.get(leaf)
        member = module._buffers.get(leaf) if member is None else member
        return member is not None and _same_memory(member, tensor)
    return False


def _shared(owner: Any, value: dict[Any, Any]) -> int:
    """Count the objects inside the state dict that `owner` returns again."""
    now = owner.state_dict()
    ids = {id(container) for container in nested_containers(now)}
    return sum(id(container) in ids for container in nested_containers(value))


# ── what builds one entry ─────────────────────────────────────────────────────────────────────


def state_dict_builder(path: str, reference: Any) -> Builder:
    """Return a builder of the state dict of a weakly referenced object."""

    def build(now: Sources) -> Any:
        owner = reference()
        if owner is None:
            raise Refused(f"the source of the {_short(path)} entry no longer exists")
        return owner.state_dict()

    return build


def member_builder(path: str, reference: Any, table: str, name: str) -> Builder:
    """Return a builder of one parameter or buffer of a weakly referenced module."""

    def build(now: Sources) -> Any:
        member = getattr(reference(), table, {}).get(name)
        if member is None:
            raise Refused(f"the source of the {_short(path)} entry no longer exists")
        return member.detach() if table == "_parameters" else member

    return build


def variable_or_default_builder(variables: list[Name], default: Builder) -> Builder:
    """Return a builder of the object that a variable holds, else `default`."""

    def build(now: Sources) -> Any:
        for name in variables:
            value = now.variables.get(name)
            if value is not MISSING and not now.stale(name, True):
                return value
        return default(now)

    return build


def variable_builder(path: str, names: list[Name], otherwise: Builder) -> Builder:
    """Return a builder of the value of the nearest variables, if these agree."""

    def build(now: Sources) -> Any:
        pairs = [(n, now.variables.get(n)) for n in names if not now.stale(n, False)]
        present = [(n, value) for n, value in pairs if value is not MISSING]
        nearest = _nearness(present[0][0]) if present else None
        near = [value for name, value in present if _nearness(name) == nearest]
        return near[0] if near and near.count(near[0]) == len(near) else otherwise(now)

    return build


def _nearness(name: Name) -> tuple[Any, int]:
    return name.scope, len(name.way)


def count_steps(now: Sources) -> int:
    """Return the count of steps; a `Builder` itself."""
    return now.steps


def unknown_builder(path: str, reason: str = "") -> Builder:
    """Return a builder that refuses an entry without a source; `reason` ends the sentence."""

    def build(now: Sources) -> Any:
        raise Refused(_unknown(path) + reason)

    return build


def _unknown(path: str) -> str:
    return f"the {_short(path)} entry of the job's checkpoints is not known"


def _short(path: str) -> str:
    return repr(path if len(path) <= _SHORT else "..." + path[-_SHORT:])


NOTHING = "the job has not saved a checkpoint yet, from which its layout could be learned"
PARTIAL = "no file that the job saves holds both its weights and its optimizer's state"
SHARDED = "the job's state is sharded, and no rank has a whole checkpoint"
NOT_REACHED = "the loop ended or went on without reaching the place where the job saves"
OF_SEVERAL_RANKS = (
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "torch.distributed.optim",
)


class ObservedSave(NamedTuple):
    """What was learned from the newest checkpoint of the job."""

    layout: Layout
    stack: save_site.Stack
    path: str


class OnDemand:
    """The command `checkpoint`, and what it must know before.

    Args:
        library: whose loop trains, if one does.
        finite: whether the newest frame held finite values only.
    """

    def __init__(
        self,
        context: ProbeContext,
        library: FrameworkCollector,
        reports: SaveReports,
        finite: Callable[[], bool],
    ) -> None:
        self._context, self._torch, self._guard = context, context.torch, context.guard
        self._position, self._registry = context.position, context.registry
        self._library, self._finite = library, finite
        self._reports = reports
        self._part = context.guard.part("checkpoint", share=1.0)
        self._saved: Optional[ObservedSave] = None
        self._why = NOTHING
        self._refusals: dict[tuple[Any, ...], int] = {}  # by the keys of a checkpoint
        self._waiting = False

    def learn_layout(self, content: Any, path: str) -> None:
        """Learn the layout of what the job saved by `torch.save`.

        The job waits for it at each save: what was refused `TRIES` times is not tried again.
        """
        self._guard.run(self._part, self._learn, content, path)

    def _learn(self, content: Any, path: str) -> None:
        self._why = PARTIAL if self._why == NOTHING else self._why
        keys = tuple(content) if isinstance(content, dict) else ()
        if not keys or self._refusals.get(keys, 0) >= TRIES:
            return
        if self._is_sharded():
            self._why = SHARDED
            return
        frames = job_frames(self._torch)
        variables = JobVariables(frames, set(map(id, nested_containers(content))))
        steps = self._position.step
        try:
            layout = Learner(self._torch, self._registry, variables, steps).learn(content)
        except Refused as refusal:
            self._why = str(refusal)
            self._refusals[keys] = self._refusals.get(keys, 0) + 1
            return
        if layout.kinds >= {"module", "optimizer"}:
            is_first = self._saved is None
            self._saved = ObservedSave(layout, save_site.code_stack(frames), path)
            if is_first:
                self._context.reporter.status_changed()

    def _is_sharded(self) -> bool:
        """Whether a state dict needs other ranks, or holds a part of the state only."""
        registry = self._registry
        owners = [*registry.modules, *registry.optimizers]
        if any(type(owner).__module__.startswith(OF_SEVERAL_RANKS) for owner in owners):
            return True
        groups = (group for optimizer in registry.optimizers for group in optimizer.param_groups)
        return any(hasattr(p, "_local_tensor") for group in groups for p in group["params"])

    def explain_refusal(self) -> str:
        """Return why none can be ordered, as far as that is known without its place."""
        reason = "" if self._part.on else f"this part of the probe is off: {self._part.reason}"
        if not (reason or self._saved or self._library.trainer):
            reason = self._why
        return reason

    def do_checkpoint(self, args: dict[str, Any]) -> dict[str, Any]:
        """Order one: `{"path": str or None}` -> `{"path", "step", "how"}`.

        The notice `checkpoint-saved` follows when the file is written, or `checkpoint-refused` with
        the reason; either comes before the next step ends. `step` counts the steps that are in it.
        """
        library, position = self._library, self._position
        if not self._part.on:
            raise Refused(f"this part of the probe is off: {self._part.reason}")
        if not self._finite():
            raise Refused("the newest step was not finite")
        path = os.path.abspath(args["path"]) if args.get("path") else ""
        if path and os.path.exists(path):
            raise Refused(f"{path} exists already")
        if library.trainer:
            return self._by_library(path)
        if position.rank:
            if self._saved is not None:
                raise Refused("each rank of the job saves a file of its own")
            return {"path": None, "step": position.step, "how": "rank 0 writes it"}
        if self._saved is None:
            raise Refused(self._why)
        return self._order(self._saved, path)

    def _by_library(self, path: str) -> dict[str, Any]:
        library = self._library
        if self._position.world_size > 1:
            raise Refused(
                f"{library.trainer} saves on all ranks at once, which needs step-fenced commands"
            )
        if path and library.names_saves:
            raise Refused(f"{library.trainer} names its checkpoints itself; leave the path out")
        library.order_save(path)
        step = self._position.step
        return {"path": path or None, "step": step, "how": library.trainer}

    def _order(self, save: ObservedSave, path: str) -> dict[str, Any]:
        if self._waiting:
            raise Refused("another checkpoint is about to be written")
        guard, position, step = self._guard, self._position, self._position.step
        frames = self._frames()
        frame, site = save_site.find_save_site(save.stack, frames)
        stem = os.path.splitext(save.path)[0]
        path = path or f"{stem}.supervise-{step}.pt"
        self._build(save, site)  # refuses at once what has no source
        save_site.call_at(
            frame,
            site,
            arrived=lambda: guard.run(self._part, self._arrived, save, site, path, frame),
            on_exit=lambda: guard.run(self._part, self._end, NOT_REACHED),
            over=lambda: position.step != step,
        )
        self._waiting = True
        return {"path": path, "step": step, "how": "on-demand"}

    def _frames(self) -> Any:
        try:
            return job_frames(self._torch)
        except CannotRestore as problem:
            raise Refused(str(problem)) from problem

    def _build(
        self, save: ObservedSave, site: save_site.SaveSite, traced: Optional[FrameType] = None
    ) -> Any:
        """Return what the job would save at this place."""
        scope = site.scope

        def stale(name: Name, container: bool) -> bool:
            return name.scope == scope and site.assigns_variable(
                (name.variable, *name.way), container
            )

        variables = JobVariables(self._frames(), set(), traced)
        with self._torch.no_grad():
            return save.layout.build(Sources(variables, stale, self._position.step))

    def _arrived(
        self, save: ObservedSave, site: save_site.SaveSite, path: str, frame: FrameType
    ) -> None:
        began = monotonic_ns()
        self._reports.enter_checkpoint_phase()
        try:
            with files.replacing_file(path, shared=True, sync=True) as file:
                self._torch.save(self._build(save, site, frame), file)
        except Exception as problem:
            self._end(str(problem) if isinstance(problem, Refused) else describe_error(problem))
        else:
            self._end("")
            seconds = (monotonic_ns() - began) / 1e9
            self._reports.report({}, path, seconds, "on-demand", path)
        finally:
            self._reports.leave_checkpoint_phase()
            self._position.held_ns += monotonic_ns() - began

    def _end(self, why_not: str) -> None:
        self._waiting = False
        if why_not:
            self._context.reporter.notice(
                "checkpoint-refused", f"no checkpoint was written: {why_not}", {"why": why_not}
            )
