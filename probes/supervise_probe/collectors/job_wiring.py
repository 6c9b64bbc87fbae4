"""Wiring of the job: whether what it trains is what its optimizers hold, and whether it moves.

Looked at in windows of a few steps, at the start and then seldom (START, EVERY). In one, tensors
without gradient are collected; whatever is suspicious is proved before it is reported: its values
did not change over the window, and its module was called in training mode in a step that left it
without gradient. So these are silent: frozen tensors, idle experts, a head that is not in use yet,
weights that the job averages itself, a backbone in eval mode, gradients that come in some steps.

A network that no optimizer holds, that is called in most steps of a window and whose weights move
all the same follows the trained one: a target network, or a teacher that is an average. What the
loss is compared with moves then, too.

A part of a model that is in no optimizer is reported where it is the smaller one, and the optimizer
takes in nothing later: the larger one is a backbone that stays as it is.

What is proved costs copies of LEAST values of a few tensors, and one look at all modules that are
called in some steps; a job in which nothing is suspicious pays for neither. Nothing is proved where
weights are sharded or an engine holds them elsewhere, nor the calls of compiled modules.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, NamedTuple, Optional

from ..runtime.guard import is_from_signal_handler
from ..torch_state.structure import FSDP1, WRAPPER
from . import Collector, MetricSpec

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import OptimizerInfo, Step, Update

SELDOM = 500  # steps between two windows, once the training has settled
WIRING_METRICS = (
    MetricSpec(
        "tensors_without_gradient",
        "1",
        "Trained tensors of the optimizers that never had a gradient, though their module was "
        "called for training, and that did not change.",
        "this project",
        "a look at all gradients in a few steps of 500",
        SELDOM,
    ),
    MetricSpec(
        "tensors_without_optimizer",
        "1",
        "Tensors of a trained model that have gradients, are in no optimizer, and did not change.",
        "this project",
        "",
        SELDOM,
    ),
    MetricSpec(
        "tensors_of_others",
        "1",
        "Tensors of an optimizer that has none with a gradient, while a model has gradients and no "
        "optimizer: as of a copy, or of the model before it was replaced.",
        "this project",
        "",
        SELDOM,
    ),
    MetricSpec(
        "modules_in_eval",
        "1",
        "Dropout and normalization layers of a trained model that is in eval mode in each "
        "training step.",
        "torch.nn.Module.training",
        "",
        SELDOM,
    ),
    MetricSpec(
        "tensors_with_stale_gradient",
        "1",
        "Tensors of a sample whose gradient nothing clears between two updates, so that each "
        "update goes by the sum of all gradients so far; absent where that cannot be seen, as of "
        "compiled modules.",
        "torch.Tensor.grad",
        "in a few steps, a look at at most 512 values of a few gradients",
        SELDOM,
    ),
    MetricSpec(
        "stream_copies",
        "1",
        "How often each batch of a stream comes: once from each worker of the loader that reads "
        "the whole stream; absent where no loader with workers reads one, and where the host does "
        "not have the batches.",
        "torch.utils.data.IterableDataset",
        "",
        SELDOM,
    ),
    MetricSpec(
        "weights_rounded_away",
        "%",
        "Share of 16-bit weights with a gradient that 12 or more updates left as they were, of a "
        "sample; absent without such weights, under a GradScaler, and while the rate rises or has "
        "fallen.",
        "an update below half the spacing of the weight's type is rounded away",
        "in a few steps, a copy of at most 32768 weights",
        SELDOM,
    ),
    MetricSpec(
        "batchnorm_rows",
        "rows",
        "Rows that a rank's BatchNorm normalizes over by itself under DistributedDataParallel; "
        "absent with one rank, and where they are synchronized.",
        "torch.nn.SyncBatchNorm",
        "",
        SELDOM,
    ),
    MetricSpec(
        "moving_targets",
        "1",
        "Networks that no optimizer holds, that are called for training and whose weights move all "
        "the same, as a target network or a teacher that is an average; absent without any that is "
        "called.",
        "Mnih et al., 2015: targets of a network that is copied now and then",
        "in a few steps a look at all modules that are called; then at the version of a tensor",
        SELDOM,
    ),
)

# Begins of windows, in steps of a training; then every SELDOM. Project defaults.
START = (0, 100, 300)
# Steps of a window: evidence is gathered behind the first, and may be late from a device.
PROOF, LAST, SETTLED, LATE = 2, 6, 19, 2
UPDATES = 5  # of an optimizer in a window, for a statement about its tensors
APPLIED = 12  # updates that a 16-bit weight should have followed
LEAST = 512  # values of a tensor that are kept
TENSORS = 64  # of which values are kept
FEW = 4  # tensors of an optimizer whose gradients are followed from update to update
CLEARED = 4  # updates, at least, between which a gradient should have been cleared
TURNS = 3  # windows for the sake of a model that left training mode
NAMES = 3  # that a report has
TARGETS, CALLS = 8, 2  # networks that are followed; steps of a window in which one is called
LONGEST = 80  # characters of a name
# Optimizers with these in their state keep the weights, or what was rounded away, elsewhere.
WIDE = ("master", "fp32", "main", "kahan", "comp", "shift")
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")

Weak = Any  # a weak reference


class Sample(NamedTuple):
    """Some values of a tensor, as they were."""

    tensor: Weak
    values: Any


class UnclearedGradient:
    """A tensor, and whether each backward that adds to its gradient finds the sum of earlier ones.

    Only backwards that change the gradient count: one that the job computes itself and copies or
    assigns, as for master weights, needs no clearing.

    Attributes:
        tensor: it. optimizer: the id of what holds it. updates: behind which a backward added.
        is_cleared: it had no gradient once. remains: on its device, whether it was never all zeros.
    """

    def __init__(self, tensor: Any, optimizer: int) -> None:
        self.tensor, self.optimizer = weakref.ref(tensor), optimizer
        self.updates = 0
        self.is_cleared = self.is_new = False
        self.remains: Any = None
        self._before: Any = None  # the gradient's identity and version, and whether it is not zero

    def record_gradient_before(self) -> None:
        """A backward begins."""
        gradient, self._before = self._gradient(), None
        if gradient is None or gradient.is_sparse:
            self.is_cleared, self.remains = True, None
        elif not self.is_cleared:
            self._before = _identity(gradient), (_values(gradient) != 0).any()

    def compare_gradient_after(self) -> None:
        """It is over: an addition in place leaves another version of the same tensor."""
        gradient, before, self._before = self._gradient(), self._before, None
        if before is None or gradient is None:
            return
        (number, version), is_left = before
        if number == id(gradient) and version != gradient._version:
            self.remains = is_left if self.remains is None else self.remains & is_left
            self.is_new = True

    def _gradient(self) -> Any:
        tensor = self.tensor()
        return None if tensor is None else tensor.grad

    def update(self) -> None:
        """The optimizer is about to step."""
        self.updates += self.is_new
        self.is_new = False


class TargetNetwork:
    """A network that no optimizer holds.

    Attributes:
        network, tensor: it, and one of its parameters. calls: steps of the window with a call.
        in_use: it was called in CALLS steps of a window. moves: its weights changed since.
    """

    def __init__(self, network: Any, tensor: Any) -> None:
        self.network, self.tensor = weakref.ref(network), weakref.ref(tensor)
        self._values, self._version = _values(tensor), tensor._version
        self.calls = 0
        self.in_use = self.moves = False

    def is_written(self) -> bool:
        """Whether somebody wrote to the tensor since the last time."""
        tensor = self.tensor()
        if tensor is None or tensor._version == self._version:
            return False
        self._version = tensor._version
        return True

    def change(self) -> Any:
        """Return where the tensor is whether it differs from what it was, None without one."""
        tensor = self.tensor()
        return None if tensor is None else (_values(tensor) != self._values).any()


class Window:
    """One look of a few steps.

    Attributes:
        start: its first step.
        missing: by optimizer, its tensors that lack a gradient so far. updates: of each so far.
        made: the job's line that made each. alive: those of which a tensor had one.
        owners: the modules of these tensors, by the tensor's id; empty: none is asked for.
        called: ids of modules that were called in the step under way, in training mode or as a
            target network.
        proven: ids of tensors that a call of their module left without gradient.
        orphans: tensors with a gradient and no optimizer, of a model that is held in part; others:
            the same of models that no optimizer holds.
        samples: of what is suspicious, by id. low: of 16-bit weights.
        rate: the learning rate behind `low`. applied: updates since then.
        in_eval: the models that were in eval mode whenever they were looked at.
        rows: that a BatchNorm was given. hook: through which calls are seen.
        residues: of gradients, when it is known what is left of them.
        changed, rounded: what is on its way to the host.
    """

    def __init__(self, start: int) -> None:
        self.start = start
        self.missing: dict[int, dict[int, Weak]] = {}
        self.updates: dict[int, int] = {}
        self.made: dict[int, str] = {}
        self.alive: set[int] = set()
        self.owners: dict[int, Weak] = {}
        self.called: set[int] = set()
        self.proven: set[int] = set()
        self.orphans: dict[int, Weak] = {}
        self.others: dict[int, Weak] = {}
        self.samples: dict[int, Sample] = {}
        self.low: list[Sample] = []
        self.rate, self.applied = 0.0, 0
        self.in_eval: dict[int, Weak] = {}
        self.rows = 0
        self.hook: Any = None
        self.residues: list[UnclearedGradient] = []
        self.changed: Any = None
        self.rounded: Any = None

    def drop_hook(self) -> None:
        """See no calls any more."""
        if self.hook is not None:
            self.hook.remove()
            self.hook = None


class JobWiringCollector(Collector):
    """Whether the optimizers hold the model, its tensors have gradients, and its weights move.

    Keeps weak references, and copies of some values while a window lasts.

    Attributes:
        residues: of a few tensors, what stays of their gradients; none but in the steps of a window
            in which evidence is gathered.
    """

    METRICS = WIRING_METRICS

    def __init__(self, context: ProbeContext, foreign: Callable[[], str]) -> None:
        """`foreign`: returns why an engine holds the weights elsewhere, "" where none does."""
        super().__init__(context)
        self._foreign = foreign
        self._registry, self._position = context.registry, context.position
        self._reporter, self._guard = context.reporter, context.guard
        self._window: Optional[Window] = None
        self.residues: list[UnclearedGradient] = []
        self._next = self._began = -1  # step of the next window, and of the first one
        self._known: set[int] = set()  # ids of the optimizers' infos
        self._had: set[int] = set()  # ids of tensors that had a gradient
        self._held: set[int] = set()  # ids of tensors that an optimizer held at the first window
        self._highest = 0.0  # learning rate of a window
        # A model that was in training mode in the newest window, and the id of its optimizer.
        self._trained: Optional[tuple[Weak, int]] = None
        self._turns = 0  # how often it left that mode
        self._copies = 0  # of each batch of a stream, until they are published
        self._targets: dict[int, TargetNetwork] = {}  # by the network's id
        self._followed: list[TargetNetwork] = []  # those in use that did not move so far

    # ── calls of a step ───────────────────────────────────────────────────────────────────────

    def measure(self, update: Update) -> None:
        step, window = self._position.step, self._window
        is_new = id(update.known) not in self._known
        over = window is None or step > window.start + LAST + LATE
        begins = is_new or (over and self._leaves_training(update.known))
        if window is None and not begins and step < self._next:
            return
        if window is None or begins:
            window = self._begin(step, update.known, is_new)
        if window is None:
            return
        offset = step - window.start
        if offset <= LAST:
            self._look(window, update, offset)
        elif offset == SETTLED and window.low and update.scaler is None:
            self._weigh(window, update)

    def after_update(self, update: Update) -> None:
        if self._window is not None and not update.skip:
            self._window.applied += 1

    def begin_backward(self) -> None:
        """A backward begins: what is there of gradients is of before."""
        for residue in self.residues:
            residue.record_gradient_before()

    def end_backward(self) -> None:
        """It is over, or raised."""
        for residue in self.residues:
            residue.compare_gradient_after()

    def record_stream_copies(self, copies: int) -> None:
        """Each worker of a loader reads a stream of its own (1), or all of them the same one."""
        self._copies = copies

    def collect(self, step: Step, values: dict[str, Number]) -> None:
        if self._copies:
            values["stream_copies"] = float(self._copies)
            self._copies = 0

        if self._followed:
            self._follow_targets(values)
        window = self._window
        if window is None:
            return
        offset = step.number - window.start
        if not 0 <= offset <= 2 * SETTLED:  # the run was taken back
            self._end()
            return
        if offset == PROOF:
            self._suspect(window)
        elif PROOF < offset <= LAST:
            self._see_calls(window)
        if offset == LAST:
            window.drop_hook()
            window.residues, self.residues = self.residues, []
            numbers = {**self._changes(window), **_remains(window.residues)}
            window.changed = self._arrival({**numbers, **self._target_changes()})
        if window.changed is not None and window.changed.ready():
            marks = window.changed.read()
            window.changed = None
            self._report(
                window, {int(name) for name in marks if name.isdigit() and marks[name]}, values
            )
            self._report_residues(window, marks, values)
            self._report_targets(marks, values)
        if offset < SETTLED:
            return
        if window.rounded is None:
            self._end()
        elif window.rounded.ready():
            self._report_rounding(window, window.rounded.read(), values)
            self._end()

    def _leaves_training(self, info: OptimizerInfo) -> bool:
        """Whether the model of this optimizer has left training mode, which is looked at soon."""
        if self._trained is None or self._trained[1] != id(info) or self._turns >= TURNS:
            return False
        model = self._trained[0]()
        if model is None or model.training:
            return False
        self._trained = None
        self._turns += 1
        return True

    def _begin(self, step: int, info: OptimizerInfo, is_new: bool) -> Optional[Window]:
        self._end()
        if is_new:
            self._known.add(id(info))
            self._began, held = step, self._optimized()
            self._had &= held
            self._held = held
        since = step - self._began
        self._next = step + next((begin - since for begin in START if begin > since), SELDOM)
        if not self._out_of_reach(info):
            self._window = Window(step)
        return self._window

    def _end(self) -> None:
        if self._window is not None:
            self._window.drop_hook()
            self._window, self.residues = None, []

    def _out_of_reach(self, info: OptimizerInfo) -> bool:
        """Whether gradients or weights lie where they cannot be seen."""
        if self._foreign() or any(hasattr(p, "_local_tensor") for p in info.params[:1]):
            return True
        return any(type(module).__name__ == FSDP1 for module in self._registry.modules)

    def _optimized(self) -> set[int]:
        """Return the ids of all tensors that an optimizer holds."""
        optimizers = self._registry.optimizers
        return {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}

    # ── gradients, and the mode of the model ──────────────────────────────────────────────────

    def _look(self, window: Window, update: Update, offset: int) -> None:
        info, had = update.known, self._had
        missing, key = {}, id(info)
        for p in info.params:
            if p.grad is not None:
                had.add(id(p))
                window.alive.add(key)
            elif p.requires_grad and id(p) not in had:
                missing[id(p)] = weakref.ref(p)
        before = window.missing.get(key, missing)
        window.missing[key] = {n: missing[n] for n in missing if n in before}
        window.updates[key] = window.updates.get(key, 0) + 1
        window.made[key] = self._registry.creation_line(update.optimizer)
        for residue in self.residues:
            if residue.optimizer == key:
                residue.update()
        if window.updates[key] == 1 and not _has_compiled():
            self.residues += [UnclearedGradient(p, key) for p in _smallest(info.params)]
        if offset in (0, PROOF, LAST):
            self._see_modes(window, info, offset)

    def _see_modes(self, window: Window, info: OptimizerInfo, offset: int) -> None:
        """Keep the models that the optimizer trains and that are wholly in eval mode."""
        for root in self._registry.roots():
            owners = [
                module
                for module in root.modules()
                if any(id(p) in info.ids for p in module._parameters.values())
            ]
            if not owners:
                continue
            if root.training or any(module.training for module in owners):
                window.in_eval.pop(id(root), None)
                if offset == LAST and root.training:
                    self._trained = weakref.ref(root), id(info)
            elif offset == 0:
                window.in_eval[id(root)] = weakref.ref(root)

    def _suspect(self, window: Window) -> None:
        """Gather what is suspicious, and begin to prove it."""
        missing = {n: ref for some in window.missing.values() for n, ref in some.items()}
        self._find_orphans(window)
        if missing and window.alive:
            for module in self._registry.modules:
                for p in module._parameters.values():
                    if id(p) in missing:
                        window.owners.setdefault(id(p), weakref.ref(module))
        suspects = {**missing, **window.orphans, **window.others}
        for number, ref in list(suspects.items())[:TENSORS]:
            tensor = ref()
            if tensor is not None and tensor.numel():
                window.samples[number] = Sample(ref, _values(tensor))
        self._find_targets()
        asked = window.owners or self._targets or self._has_lonely_norms()
        if asked and not _has_compiled():
            self._watch_calls(window)
        self._keep_low(window)

    def _find_orphans(self, window: Window) -> None:
        """Look for tensors with gradients that are in no optimizer."""
        held = self._optimized()
        for _, root in self._models():
            lost: dict[int, Weak] = {}
            sizes = {True: 0, False: 0}  # values of tensors that are held, and that are not
            for p in root.parameters() if root.training else ():
                if p.requires_grad and p.grad is not None:
                    is_held = id(p) in held
                    sizes[is_held] += p.numel()
                    if not is_held:
                        lost[id(p)] = weakref.ref(p)
            if not sizes[True]:
                window.others.update(lost)
            elif sizes[False] <= sizes[True] and held <= self._held:
                window.orphans.update(lost)

    def _models(self) -> Iterator[tuple[str, Any]]:
        """Yield the outermost modules with parameters; with a name where there are several."""
        modules = list(self._registry.modules)
        inner = {id(child) for module in modules for child in module.children()}
        roots = [
            module
            for module in modules
            if id(module) not in inner and next(module.parameters(), None) is not None
        ]
        for root in roots:
            yield f"{type(root).__name__}." if len(roots) > 1 else "", root

    # ── calls of modules ──────────────────────────────────────────────────────────────────────

    def _watch_calls(self, window: Window) -> None:
        torch, reference = self.torch, weakref.ref(window)
        norm, targets = torch.nn.modules.batchnorm._BatchNorm, frozenset(self._targets)
        guard = self._guard
        part = guard.part("job_wiring")

        def look(module: Any, inputs: Any) -> None:
            alive = reference()
            if alive is not None and (module.training or id(module) in targets):
                alive.called.add(id(module))
                if isinstance(module, norm) and inputs and type(inputs[0]) is torch.Tensor:
                    alive.rows = len(inputs[0])

        def see(module: Any, inputs: Any) -> None:
            try:  # `guard.run` would look at the clock for each layer
                look(module, inputs)
            except Exception as error:  # inside the job's forward nothing may be raised
                if is_from_signal_handler(error):
                    raise
                guard.failed(part, error)

        window.hook = self.torch.nn.modules.module.register_module_forward_pre_hook(see)

    def _see_calls(self, window: Window) -> None:
        """A step is over: which tensors lack a gradient though their module was called."""
        called, window.called = window.called, set()
        for number in called & set(self._targets):
            self._targets[number].calls += 1
        missing = {number for some in window.missing.values() for number in some}
        for number, ref in window.owners.items():
            module = ref()
            # One that is left over in a module beside others in use is no fault of the wiring.
            if number not in missing or module is None or id(module) not in called:
                continue
            if not any(id(p) in self._had for p in module.parameters()):
                window.proven.add(number)

    def _find_targets(self) -> None:
        """Look for networks of which no optimizer holds a parameter, and that need no gradient."""
        held, before = self._optimized(), self._targets
        self._targets = {}
        for network in self._networks_beside([root for _, root in self._models()], held):
            known = before.get(id(network))
            if known is None or known.network() is not network or known.tensor() is None:
                tensor = next((p for p in network.parameters() if p.is_floating_point()), None)
                known = None if tensor is None else TargetNetwork(network, tensor)
            if known is not None and len(self._targets) < TARGETS:
                known.calls = 0
                self._targets[id(network)] = known

    def _networks_beside(self, modules: Iterable[Any], held: set[int]) -> Iterator[Any]:
        """Yield outermost modules with several layers, of which no optimizer holds a parameter."""
        for module in modules:
            params = list(module.parameters())
            if any(id(p) in held for p in params):
                yield from self._networks_beside(list(module.children()), held)
                continue
            is_network = len(params) > 1 and next(module.children(), None) is not None
            if is_network and all(p.grad is None for p in params):
                yield module

    def _has_lonely_norms(self) -> bool:
        """Whether each rank normalizes its own rows."""
        if self._position.world_size < 2:
            return False
        batchnorm = self.torch.nn.modules.batchnorm
        return any(
            isinstance(module, batchnorm._BatchNorm)
            and not isinstance(module, batchnorm.SyncBatchNorm)
            and module.track_running_stats
            for wrapper in self._registry.modules
            if type(wrapper).__name__ == WRAPPER
            for module in wrapper.modules()
        )

    # ── values ────────────────────────────────────────────────────────────────────────────────

    def _changes(self, window: Window) -> dict[str, Any]:
        """Return which suspicious tensors have changed, where they are."""
        changes: dict[str, Any] = {}
        for number, sample in window.samples.items():
            tensor = sample.tensor()
            if tensor is not None:
                changes[str(number)] = (_values(tensor) != sample.values).any().double()
        return changes

    def _target_changes(self) -> dict[str, Any]:
        """Return which target networks have changed, where they are."""
        changes: dict[str, Any] = {}
        for number, target in self._targets.items():
            target.in_use |= target.calls >= CALLS
            change = target.change() if target.in_use else None
            if change is not None:
                changes[f"target.{number}"] = change.double()
        return changes

    def _follow_targets(self, values: dict[str, Number]) -> None:
        """Report at once that a network in use was written, where the host can tell its values."""
        for target in self._followed:
            change = target.change() if target.is_written() else None
            if change is not None and self.scalars.can_read_now(change):
                target.moves = bool(change)
        if any(target.moves for target in self._followed):
            self._count_targets(values)

    def _count_targets(self, values: dict[str, Number]) -> None:
        used = [target for target in self._targets.values() if target.in_use]
        self._followed = [target for target in used if not target.moves]
        if used:
            values["moving_targets"] = float(sum(target.moves for target in used))

    def _keep_low(self, window: Window) -> None:
        """Keep values of 16-bit weights, which small updates may leave as they are."""
        low, tensors = (self.torch.bfloat16, self.torch.float16), []
        for optimizer in self._registry.optimizers:
            groups = optimizer.param_groups
            params = [p for g in groups for p in g["params"] if p.dtype in low and p.numel()]
            if params and not _keeps_wide(optimizer):
                window.rate = max(window.rate, _rate(groups))
                tensors += [p for p in params if p.grad is not None]
        for p in tensors[:: 1 + len(tensors) // TENSORS]:
            window.low.append(Sample(weakref.ref(p), _values(p)))
        window.applied = 0

    def _weigh(self, window: Window, update: Update) -> None:
        """Count the 16-bit weights with a gradient, and those of them that did not move."""
        rate = _rate(update.optimizer.param_groups)
        is_settled = 0.5 * self._highest <= rate <= 1.05 * window.rate
        self._highest = max(self._highest, rate)
        if not is_settled or window.applied < APPLIED or window.rounded is not None:
            return
        counts: dict[str, Any] = {}
        for number, sample in enumerate(window.low):
            tensor = sample.tensor()
            if tensor is not None and tensor.grad is not None and not tensor.grad.is_sparse:
                pushed = _values(tensor.grad) != 0
                stays = pushed & (_values(tensor) == sample.values)
                counts[f"pushed.{number}"] = pushed.sum().double()
                counts[f"stays.{number}"] = stays.sum().double()
        window.rounded = self._arrival(counts)

    def _arrival(self, numbers: dict[str, Any]) -> Any:
        """Return what has these on the host as soon as that needs no waiting."""
        reads = self.scalars.can_read_now
        known = {name: float(n) if reads(n) else n for name, n in numbers.items()}
        return self.scalars.pack(known) or Arrived(known)

    # ── reports ───────────────────────────────────────────────────────────────────────────────

    def _report(self, window: Window, changed: set[int], values: dict[str, Number]) -> None:
        """All of a window is known but for what was rounded away."""
        lost = [n for n in window.orphans if n not in changed]
        others = [n for n in window.others if n not in changed]
        silent: list[int] = []
        stale: list[int] = []
        keys = list(window.missing)
        for key in keys:
            still = {n for n, ref in window.missing[key].items() if ref() is not None} - changed
            is_whole = key not in window.alive and len(still) == len(window.missing[key])
            if window.updates[key] < UPDATES or not still:
                continue
            if is_whole and (others or lost):
                stale += still
            elif is_whole and not window.alive:
                silent += still
            else:
                silent += still & window.proven
            keys = [key]
        made = window.made[keys[0]] if keys else ""
        held = len(self._optimized())
        self._publish("tensors_without_gradient", values, self._named(silent), held, made)
        lost_names = [] if stale else self._named(lost)
        self._publish("tensors_without_optimizer", values, lost_names, held, made)
        other_names = self._named(others or lost) if stale else []
        self._publish("tensors_of_others", values, other_names, len(stale), made)
        names = list(self._asleep(window))
        self._publish("modules_in_eval", values, names, len(names))
        if window.rows and self._has_lonely_norms():
            values["batchnorm_rows"] = float(window.rows)

    def _publish(
        self, metric: str, values: dict[str, Number], names: list[str], total: int, made: str = ""
    ) -> None:
        """Publish how many there are, and what a message needs beside it."""
        values[metric] = float(len(names))
        if names:
            self._notice(metric, names, total, made)

    def _notice(self, metric: str, names: list[str], total: int, made: str = "") -> None:
        data = {
            "metric": metric,
            "names": [name[:LONGEST] for name in names[:NAMES] if name],
            "count": len(names),
            "total": total,
            "made": made,
        }
        self._reporter.notice("wiring", f"{metric}: {len(names)} of {total}", data)

    def _named(self, numbers: Iterable[int]) -> list[str]:
        """Return the names of tensors by their ids, in the order of the model; "" without one."""
        rest = set(numbers)
        if not rest:
            return []
        names = []
        for prefix, root in self._models():
            for path, p in root.named_parameters():
                if id(p) in rest:
                    rest.discard(id(p))
                    names.append(prefix + _short(path))
        return names + [""] * len(rest)

    def _report_residues(
        self, window: Window, marks: dict[str, float], values: dict[str, Number]
    ) -> None:
        """Report the optimizers of which nothing clears the gradients."""
        if not any(r.updates >= CLEARED or r.is_cleared for r in window.residues):
            return  # nothing is known of them
        stale: list[int] = []
        made = ""
        for key in window.made:
            own = [(n, r) for n, r in enumerate(window.residues) if r.optimizer == key]
            remain = [r for n, r in own if marks.get(f"remains.{n}")]
            if 2 * len(remain) >= max(1, len(own)) and not any(r.is_cleared for _, r in own):
                stale += [id(r.tensor()) for r in remain]
                made = window.made[key]
        self._publish("tensors_with_stale_gradient", values, self._named(stale), len(stale), made)

    def _report_targets(self, marks: dict[str, float], values: dict[str, Number]) -> None:
        for number, target in self._targets.items():
            target.moves |= bool(marks.get(f"target.{number}"))
        self._count_targets(values)

    def _asleep(self, window: Window) -> Iterator[str]:
        """Yield the layers that training mode would change, of models in eval mode."""
        batchnorm, dropout = self.torch.nn.modules.batchnorm, self.torch.nn.modules.dropout
        for ref in window.in_eval.values():
            root = ref()
            for path, module in root.named_modules() if root is not None else ():
                drops = isinstance(module, dropout._DropoutNd) and module.p > 0.0
                norms = isinstance(module, batchnorm._NormBase) and module.track_running_stats
                if drops or norms:
                    yield f"{_short(path)} ({type(module).__name__})"

    def _report_rounding(
        self, window: Window, counts: dict[str, float], values: dict[str, Number]
    ) -> None:
        numbers = range(len(window.low))
        pushed = sum(counts.get(f"pushed.{number}", 0.0) for number in numbers)
        stays = {number: counts.get(f"stays.{number}", 0.0) for number in numbers}
        if not pushed:
            return
        values["weights_rounded_away"] = 100.0 * sum(stays.values()) / pushed
        if values["weights_rounded_away"] > 50.0:
            most = sorted(stays, key=lambda number: -stays[number])
            tensors = [window.low[number].tensor() for number in most]
            self._notice("weights_rounded_away", self._named(map(id, tensors)), len(tensors))


class Arrived(NamedTuple):
    """Numbers that are on the host already."""

    numbers: dict[str, float]

    def ready(self) -> bool:
        return True

    def read(self) -> dict[str, float]:
        return self.numbers


def _identity(tensor: Any) -> tuple[int, int]:
    """Return numbers of which one changes when the tensor is replaced, or changed in place."""
    return id(tensor), tensor._version


def _remains(residues: list[UnclearedGradient]) -> dict[str, Any]:
    """Return of which tensors, by their number, each backward added to an older gradient."""
    return {
        f"remains.{number}": residue.remains.double()
        for number, residue in enumerate(residues)
        if residue.updates >= CLEARED and not residue.is_cleared
    }


def _smallest(params: Iterable[Any]) -> list[Any]:
    """Return a few small tensors that have a gradient."""
    dense = [p for p in params if p.grad is not None and not p.grad.is_sparse and p.numel()]
    whole = [p for p in dense if not hasattr(p, "_local_tensor")]  # a shard would ask other ranks
    return sorted(whole, key=lambda p: p.numel())[:FEW]


def _values(tensor: Any) -> Any:
    """Return a copy of the first values of a tensor."""
    return tensor.detach().flatten()[:LEAST].clone()


def _rate(groups: list[dict[str, Any]]) -> float:
    """Return the highest learning rate of these groups that the host knows."""
    rates = [group.get("lr") for group in groups]
    return max((rate for rate in rates if isinstance(rate, float)), default=0.0)


def _keeps_wide(optimizer: Any) -> bool:
    """Whether the optimizer keeps its weights, or what is rounded away, in another place."""
    state = next(iter(optimizer.state.values()), None)
    keys = list(state) if isinstance(state, dict) else []
    return any(part in str(key) for key in keys for part in WIDE)


def _has_compiled() -> bool:
    """Whether torch.compile was used, which would see a hook and compile anew."""
    frames = getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0)
    return bool(frames)


def _short(path: str) -> str:
    """Return the path of a member without the wrappers around the model."""
    for wrapper in WRAPPERS:
        path = path.replace(wrapper, "")
    return path
