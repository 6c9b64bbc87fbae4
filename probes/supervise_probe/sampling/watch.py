"""Takes the samples that are due in a forward, while the job's own first forward of the step runs.

`Sampler` is the probe's; `ForwardWatch` exists for one forward: hooks on blocks and routers and
stand-ins for attention functions, all of which are gone when the forward returns or raises, so that
no pickle or copy of a module ever holds one. Nothing is run twice, and no gradient is asked of
anything.

Under torch.compile none of that would be seen, or it would be traced: where anything was compiled
in this process, inputs are kept for the side path instead (`side_forward.py`).
"""

from __future__ import annotations

import sys
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional

from ..torch_state.structure import Structure, Structures, nested_leaves
from . import side_forward
from .activations import Activations, Attention, KeyGradients, Routing, StandIns
from .side_forward import Trials

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from .sample_sets import SampleSets
    from .weight_pairs import WeightPairs


class RetainedForward(NamedTuple):
    """A forward that is to be run once more, for the sets that are due."""

    root: Any
    structure: Structure
    due: frozenset[str]
    inputs: side_forward.Inputs


class Sampler:
    """What is sampled in forwards, in one process.

    Attributes:
        kept: inputs that wait for the side path, else None.
        keys: the gradients of keys that come in the backward of a watched forward, else None.
        wants_logits: the next logits that go into a loss are to be looked at.
        refused: why the side path cannot be taken, "" while it can or need not.
        trials: which models may be run once more.
    """

    def __init__(
        self, context: ProbeContext, sets: SampleSets, extra: dict[str, Number], pairs: WeightPairs
    ) -> None:
        """`extra`: what joins the frame of the step under way. pairs: looks whose weights it is."""
        self._context, self._sets, self._extra = context, sets, extra
        self._torch, self._pairs = context.torch, pairs
        self._structures = Structures(context.torch)
        self._part = context.guard.part("sampler", share=1.0)
        self._watch: Optional[ForwardWatch] = None
        self.kept: Optional[RetainedForward] = None
        self.keys: Optional[KeyGradients] = None
        self.wants_logits = False
        self.refused = ""
        self.trials = Trials(context)

    def enter(self, root: Any, compiled: bool, args: tuple[Any, ...], kwargs: Any) -> None:
        """The first forward of a step with due samples is about to run."""
        due = self._sets.due
        structure = self.structure(root)
        if not structure.routers:
            due = due - {"routing"}
        self.wants_logits = "activations" in due
        if not due & {"attention", "activations", "routing"}:
            return
        if self.may_be_compiled(root, compiled):
            self._keep(root, structure, due, args, kwargs)
            return
        self._watch = ForwardWatch(
            self._context, self._sets, structure, due, (*args, *kwargs.values())
        )
        if "attention" in due and self._pairs.is_on:
            self._pairs.begin_forward(structure)
            self._watch.saw_call = self._pairs.record_attention_call
        self._watch.install_hooks()
        self.keys = self._watch.keys

    def leave(self, result: Any) -> None:
        """That forward is over; `result` is None if it raised. Never raises."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.remove_hooks()
            self._context.guard.run(self._part, self._take, watch, result)

    def structure(self, root: Any) -> Structure:
        """Return what an outermost module is made of."""
        return self._structures.structure_of(root, self._context.registry.modules.changes)

    def add_logits(self, logits: Any) -> None:
        """A loss was taken of these logits, outside a watched forward or inside."""
        self.wants_logits = False
        without_grad = self._context.gate.call_without_grad
        self._sets.run("activations", without_grad, self._logits, logits)

    def collect_backward_samples(self) -> None:
        """The optimizer is about to step: what a watched forward's backward showed is there."""
        keys, self.keys = self.keys, None
        if keys is not None:
            report = self._context.gate.call_without_grad
            self._sets.run("attention", report, lambda: self._report(keys.values()))

    def side_pass(self) -> None:
        """The optimizer is about to step: run what was kept through the original module."""
        forward, self.kept = self.kept, None
        if forward is None:
            return
        # The trial is no sample: what it costs it costs once.
        if not self._context.guard.run(self._part, self._may, self.trials.output_drifts, forward):
            return
        name = next(iter(forward.due))
        watch = ForwardWatch(
            self._context, self._sets, forward.structure, forward.due, forward.inputs.values()
        )
        outputs: list[Any] = []
        again = partial(self.trials.run, watch=watch, take=outputs.append)
        if self._sets.run(name, self._may, again, forward):
            self._take(watch, outputs[0])

    def _may(self, function: Callable[..., Any], forward: RetainedForward) -> bool:
        """Call `function` for what was kept; whether it was not refused."""
        try:
            side_forward.check_runnable(self._context, forward.root, compiled=True)
            function(forward.root, forward.inputs)
        except side_forward.RefusedError as refusal:
            self._side_path(str(refusal))
            return False
        return True

    def _side_path(self, refused: str) -> None:
        if refused != self.refused:
            self.refused = refused
            self._context.reporter.status_changed()

    def _keep(
        self,
        root: Any,
        structure: Structure,
        due: frozenset[str],
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> None:
        reason, self.kept = "", None
        try:
            self.trials.raise_if_refused(root)
            side_forward.check_runnable(self._context, root, compiled=True)
            inputs = side_forward.keep_first_rows(self._context, root, args, kwargs)
            self.kept = RetainedForward(root, structure, due, inputs)
        except side_forward.RefusedError as refusal:
            reason = str(refusal)
        self._side_path(reason)

    def may_be_compiled(self, root: Any, compiled: bool) -> bool:
        """Whether `root` is `compiled`, or anything in this process: functions cannot be asked."""
        if compiled or self.structure(root).compiled:
            return True
        frames = getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0)
        counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
        return bool(frames or (counters and counters.get("stats")))

    def _logits(self, logits: Any) -> None:
        activations = Activations(self._torch)
        logits = logits.detach()  # here, where no mode of the job's sees it
        activations.logits(logits.transpose(1, -1) if logits.dim() > 2 else logits)
        self._report(activations.values())

    def _take(self, watch: ForwardWatch, result: Any) -> None:
        """Let what was seen join the frame of the step."""
        for name, part in watch.parts():
            without_grad = self._context.gate.call_without_grad
            self._sets.run(name, without_grad, self._finish, part, watch.structure, result)

    def _finish(self, part: Any, structure: Structure, result: Any) -> None:
        if isinstance(part, Activations) and self.wants_logits and result is not None:
            part.output(result, structure.vocabularies)
            self.wants_logits = part.logz is None
        self._report(part.values())

    def _report(self, values: dict[str, Any]) -> None:
        if not values:
            return
        stack = self._torch.stack([value.reshape(()).float() for value in values.values()])
        scalars = self._context.scalars
        if scalars.can_read_now(stack):
            numbers = stack.tolist()
        else:
            wide = stack.to(
                self._torch.float32 if stack.device.type == "mps" else self._torch.float64
            )
            numbers = list(wide.unbind())
        for name, number in zip(values, numbers):
            self._extra.setdefault(name, number)


class ForwardWatch:
    """One forward being watched."""

    def __init__(
        self,
        context: ProbeContext,
        sets: SampleSets,
        structure: Structure,
        due: frozenset[str],
        inputs: tuple[Any, ...],
    ) -> None:
        torch = self._torch = context.torch
        self._gate, self._sets = context.gate, sets
        self.structure = structure
        self._compiling = torch.compiler.is_compiling
        self._modes = getattr(torch._C, "_len_torch_dispatch_stack", int)
        self._attention = Attention(torch, _batch(torch, inputs)) if "attention" in due else None
        # No method of this: they would refer to each other, and only the collector frees that.
        run = partial(sets.run, "attention", context.gate.call_without_grad)
        self.keys = KeyGradients(torch, run) if "attention" in due else None
        self.saw_call: Callable[..., None] = _nothing
        self._activations = Activations(torch) if "activations" in due else None
        self._routing = Routing(torch) if "routing" in due else None
        self._stand_ins: Optional[StandIns] = None
        self._hooks: list[Any] = []

    def install_hooks(self) -> None:
        """Put hooks and stand-ins in place; all or none."""
        try:
            if self._activations is not None:
                for index, block in enumerate(self.structure.blocks):
                    self._hook(block(), "activations", self._activations.block, index)
            if self._routing is not None:
                for router in self.structure.routers:
                    self._hook(router.module(), "routing", self._routing.router, router)
            if self._attention is not None and self.keys is not None:
                attention, keys = self._attention, self.keys

                def look_at_call(args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
                    self._look("attention", attention.sdpa, args, kwargs)
                    self._sets.run("attention", keys.watch, args, kwargs, output)
                    self.saw_call(args, kwargs)

                self._stand_ins = StandIns(
                    self._torch,
                    look_at_call,
                    lambda logits, dim: self._look("attention", attention.softmax, logits, dim),
                    self._quiet,
                )
                self._stand_ins.install()
        except BaseException:
            self.remove_hooks()
            raise

    def remove_hooks(self) -> None:
        """Take all of them away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._stand_ins is not None:
            self._stand_ins.close()
            self._stand_ins = None

    def __enter__(self) -> None:
        self.install_hooks()

    def __exit__(self, *error: object) -> None:
        self.remove_hooks()

    def parts(self) -> list[tuple[str, Any]]:
        """Return what looked, by the name of its set."""
        every = (
            ("attention", self._attention),
            ("activations", self._activations),
            ("routing", self._routing),
        )
        return [(name, part) for name, part in every if part is not None]

    def _hook(self, module: Any, name: str, look: Callable[..., Any], which: Any) -> None:
        if module is None:
            return

        def hook(module: Any, args: Any, output: Any) -> None:
            if not self._compiling() and not self._quiet():
                self._look(name, look, which, output)

        self._hooks.append(module.register_forward_hook(hook))

    def _quiet(self) -> bool:
        """Whether a look would be taken for the job's own: another thread, a tracer, a mode."""
        return bool(self._gate.must_skip_hook() or self._modes())

    def _look(self, name: str, look: Callable[..., Any], *args: Any) -> None:
        self._sets.run(name, self._plainly, look, *args)

    def _plainly(self, look: Callable[..., Any], *args: Any) -> None:
        """Look without gradients and without autocast, whose casts would cost accuracy."""
        torch = self._torch
        device = next(
            (v.device.type for v in nested_leaves(args) if isinstance(v, torch.Tensor)), "cpu"
        )
        with torch.autocast(device_type=device, enabled=False):
            self._gate.call_without_grad(look, *args)


def _nothing(args: tuple[Any, ...], kwargs: Any) -> None:
    """Nobody wants to know which calls there are."""


def _batch(torch: Any, inputs: tuple[Any, ...]) -> list[int]:
    """Return the sizes that the batch dimension may have: those of the first input's first two."""
    for value in nested_leaves(inputs):
        if isinstance(value, torch.Tensor) and value.dim() > 1:
            return [int(size) for size in value.shape[:2]]
    return []


MOST, MOST_BYTES = 8, 32 << 20
SMALL = 1e-30


class Snapshots:
    """The copies of one process.

    Attributes:
        arriving: a copy is on its way from an accelerator.
    """

    def __init__(
        self, context: ProbeContext, sets: SampleSets, sampler: Sampler, extra: dict[str, Number]
    ) -> None:
        """`extra`: what joins the next frame."""
        self._torch, self._scalars = context.torch, context.scalars
        self._registry, self._without_grad = context.registry, context.gate.call_without_grad
        self._sets, self._sampler, self._extra = sets, sampler, extra
        self._watched: dict[str, Any] = {}  # name -> weak reference to the parameter
        self._changes = -1
        self._copies: dict[str, Any] = {}
        self._events: list[Any] = []  # one for each device that the copies come from
        self.arriving = False

    def copy_matrices(self) -> None:
        """Copy all watched matrices now, between two steps."""
        if self._watched or self._registry.modules.changes != self._changes:
            self._sets.run("routers", self._without_grad, self._take)

    def use_arrived_copies(self) -> None:
        """Use copies that have arrived. Never waits."""
        self._sets.run("routers", self._without_grad, self._look)

    def _take(self) -> None:
        if self.arriving:
            return  # a device that far behind gets no second copy to make
        self._choose()
        alive = {n: p for n, p in ((n, r()) for n, r in self._watched.items()) if p is not None}
        if not alive:
            return
        spare = self._copies
        self._copies = {n: self._copy(p.detach(), spare.get(n)) for n, p in alive.items()}
        scalars = self._scalars
        devices = {p.device for p in alive.values() if not scalars.can_read_now(p)}
        self._events = [scalars.event(device) for device in devices]
        self.arriving = True
        if not devices:
            self._look()

    def _copy(self, weight: Any, spare: Any) -> Any:
        torch = self._torch
        if spare is None or spare.shape != weight.shape:
            pinned = weight.device.type == "cuda"
            spare = torch.empty(weight.shape, dtype=torch.float32, device="cpu", pin_memory=pinned)
        if weight.device.type == "cpu":
            return spare.copy_(weight)
        return spare.copy_(weight.float(), non_blocking=True)

    def _look(self) -> None:
        if not all(event.query() for event in self._events):
            return
        self.arriving = False
        self._extra.update(self._values())

    def _choose(self) -> None:
        """Choose the matrices again when modules came or went."""
        changes = self._registry.modules.changes
        if changes == self._changes:
            return
        self._changes = changes
        routers: list[tuple[str, Any]] = []
        for root in self._registry.roots():
            weight_names = {f"{r.name}.weight" for r in self._sampler.structure(root).routers}
            for name, parameter in root.named_parameters():
                is_matrix = parameter.dim() == 2 and not hasattr(parameter, "_local_tensor")
                if name in weight_names and is_matrix:
                    routers.append((name, parameter))
        self._watched = {name: weakref.ref(p) for name, p in _fitting(routers)}
        self._copies = {}

    def _values(self) -> dict[str, float]:
        if not self._copies:
            return {}
        similar, condition = zip(*map(_router, self._copies.values()))
        return {
            "router_weight_similarity": sum(similar) / len(similar),
            "router_conditioning": max(condition),
        }


def _fitting(candidates: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return at most MOST in MOST_BYTES, evenly spread over what was found."""
    largest = max((4 * p.numel() for _, p in candidates), default=1)
    count = min(MOST, len(candidates), MOST_BYTES // max(1, largest))
    return [candidates[i * len(candidates) // count] for i in range(count)]


def _router(weight: Any) -> tuple[float, float]:
    """Return the mean pairwise cosine of rows, and the largest centred row over the mean row."""
    rows = weight.double()
    experts = rows.shape[0]
    unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=SMALL)
    similar = (experts * unit.mean(0).square().sum() - 1) / max(1, experts - 1)
    mean = rows.mean(0)
    centred = (rows - mean).norm(dim=1).amax()
    return float(similar), float(centred / mean.norm().clamp(min=SMALL))
