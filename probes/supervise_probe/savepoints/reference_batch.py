"""The probe batch: two fixed rows whose loss shows whether the weights are the expected ones.

They come from the first training input, and run through the model once more
(`sampling/side_forward.py`, a `fixed` run) when a savepoint is taken, when the job saves a
checkpoint, and after a rollback or resume to either: another loss then means other weights. The
value is the loss where the model's output holds a floating tensor of one element, else the mean of
the squares of the first floating tensor in it.

Before the supervisor takes the weights back for a loss it asks for the loss of these rows, now and
at the last savepoints (`check_weights`): where it is what it was, a batch was bad and not they. So
does `skip_outliers` before it goes on skipping.

With several ranks each asks for its own rows, where it can run the model without the others
(`side_forward.runnable_module`); nothing is compared with what a checkpoint has, but the model in
that is evaluated by the rows of the rank that saved it.

The batch stays the same until the supervisor sees that the data changed; a later process reads that
of its checkpoint from its file. It costs one forward of two rows per savepoint, save and question,
nothing at any other step; and once a trial of the model (`sampling/side_forward.py`). What cannot
be computed is reported with the reason and not judged: so is a save between a forward and its
backward.

With the batch goes, once in a process, the structure of the model without its weights
(`torch_state.structure`): a checkpoint is evaluated beside the job with both.

On an accelerator the value and the rows go to the host by a copy that is not waited for; only what
has arrived is handed to the thread that writes.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Iterable, Mapping, Optional

from ..context import Refused
from ..runtime import files
from ..sampling import side_forward
from ..sampling.side_forward import SAME, is_close, output_value
from ..torch_state.structure import StructureError, nested_leaves, pickle_structure
from . import weights_check
from .step_history import CLOSE
from .weights_check import ReferenceOutput, Targets

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.files import Background
    from ..runtime.scalars import Number
    from ..sampling.sample_sets import SampleSets
    from ..sampling.watch import Sampler
    from ..torch_state.records import Times
    from .step_history import StepHistory

    LookOn = Callable[[Optional[Callable[[Any], None]]], None]

WHAT = "supervise probe batch 1"
KEY, SERIAL = "probe_batch", "probe_batch_serial"  # of a savepoint's counters
DIGEST, REASON = 32, 80  # characters: a letter has little room
EVALUATION = "evaluation"  # of a save, instead of the former: for no comparison of a resume
UNSEEN = "no batch had been seen when it was saved"
OTHER = "the probe batch is another one since the data changed"
DRIFTS = "a forward of the model changes what the next one gives"
NO_BACKWARD = "a forward of the training has not had its backward"
NO_MODEL = "no model here matches the one that it was kept of"
NO_LOSS = "it is not known what loss the model has of it"
# For one weight: two images of ten classes, say, tell little of what it costs. Project defaults.
MANY_ROWS, MANY_BYTES = 64, 1 << 20
KNOWN = 4  # losses at savepoints that are kept, newest
RERUN_EVERY, PROOFS = 8, 2  # savepoints; pairs that show whether a forward repeats to the bit


class ReferenceBatch:
    """The fixed batch of one process.

    Attributes:
        why_not: why there is no value, "" while there is.
    """

    def __init__(
        self,
        context: ProbeContext,
        sets: SampleSets,
        sampler: Sampler,
        times: Times,
        background: Background,
        history: StepHistory,
        look_on: LookOn,
        extra: dict[str, Number],
    ) -> None:
        """Begin.

        Args:
            look_on: lets a function see the logits of losses that are taken without gradients.
            extra: what joins the next frame.
        """
        config = context.config
        self._context, self._torch, self._scalars = context, context.torch, context.scalars
        self._position, self._guard = context.position, context.guard
        self._sets, self._sampler, self._times = sets, sampler, times
        self._background, self._history = background, history
        self._look_on, self._extra = look_on, extra
        self._part = context.guard.part(KEY, share=1.0)
        self._root: Callable[[], Any] = lambda: None
        self._compiled = False
        self._inputs: Optional[side_forward.Inputs] = None
        self._host: Any = None  # their args and kwargs on the host
        self._host_targets: Optional[Targets] = None
        self._arrivals: list[Any] = []  # events: they are there
        self._path = ""
        self._written = False
        self._structure: dict[str, str] = {}  # its hash, or why there is none
        self._serial = 0  # of the batch
        self._drifts: Optional[bool] = None  # a forward changes the next one
        self._rows = 0  # of the input that two were taken of
        self._output = ReferenceOutput(context.torch)
        self._many: Optional[side_forward.Inputs] = None  # more rows of the same batch
        self._output_of_many = ReferenceOutput(context.torch, MANY_ROWS)
        self._losses: deque[tuple[int, Any]] = deque(maxlen=KNOWN)  # by step, at savepoints
        # Only `check_weights` asks for a loss of pairs: it may be one term of the job's, and rise.
        self._pair_losses: deque[tuple[int, Any]] = deque(maxlen=KNOWN)
        self._values, self._proofs = 0, 0  # at savepoints; pairs that were the same, -1: not all
        self.why_not = UNSEEN
        self._given = config.probe_batch
        self._on = self._given is not None
        self._compares = bool(self._on and config.attempt and config.first_step)
        self._several = self._position.world_size > 1
        if not self._on:
            return
        if self._several:
            self._compares, self._given = False, {}  # what a checkpoint has is of one process
        if not (self._given or {}).get("path"):
            sets.want()

    # ── where it comes from ───────────────────────────────────────────────────────────────────

    def observe(
        self, root: Any, compiled: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Keep two rows of this input of a training forward."""
        self._guard.run(self._part, self._keep, root, compiled, args, kwargs)

    def _keep(
        self, root: Any, compiled: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        context, config = self._context, self._context.config
        try:
            self._compiled = self._sampler.may_be_compiled(root, compiled)
            root = side_forward.runnable_module(context, root)
            side_forward.check_runnable(context, root, self._compiled, alone=self._several)
            self._sampler.trials.raise_if_refused(root)
            self._inputs = inputs = side_forward.keep_first_rows(context, root, args, kwargs)
            tensors = (
                v for v in nested_leaves((args, kwargs)) if isinstance(v, self._torch.Tensor)
            )
            self._rows = int(next(tensors).shape[0])
            with suppress(side_forward.RefusedError):
                self._many = side_forward.keep_first_rows(
                    context, root, args, kwargs, MANY_ROWS, MANY_BYTES
                )
        except side_forward.RefusedError as refusal:
            self._refuse(str(refusal))
            return
        to_host = partial(self._to_host, arrivals=self._arrivals)
        self._host = side_forward.map_tensors(self._torch, (inputs.args, inputs.kwargs), to_host)
        self._root, self.why_not = weakref.ref(root), ""
        serial = f".{self._serial}" if self._serial else ""
        home = os.path.join(os.path.dirname(config.marks), KEY)  # of the run directory
        self._path = os.path.join(home, f"{config.attempt}.{self._position.rank}{serial}.pt")

    def observe_targets(self, logits: Any, targets: Any, ignored: int) -> None:
        """The first loss of that step was taken of these."""
        if self._inputs is not None:
            self._guard.run(self._part, self._keep_targets, logits, targets, ignored)

    def _keep_targets(self, *of_loss: Any) -> None:
        self._output.keep_targets(self._rows, *of_loss)
        self._output_of_many.keep_targets(self._rows, *of_loss)
        targets = self._output.targets
        if targets is not None:
            self._host_targets = targets._replace(rows=self._to_host(targets.rows, self._arrivals))

    def observe_pair(self, output: Any, target: Any, take: Callable[..., Any]) -> None:
        """The first loss of that step was taken of a target as large as the output."""
        if self._inputs is not None:
            keep = self._output.keep_pair
            self._guard.run(self._part, keep, self._rows, output, target, take)

    def _to_host(self, tensor: Any, arrivals: list[Any]) -> Any:
        """Start a copy to the host, and add the event of its arrival; one of the host is itself."""
        if self._scalars.can_read_now(tensor):
            return tensor
        host = self._torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        host.copy_(tensor, non_blocking=True)
        arrivals.append(self._scalars.event(tensor.device))
        return host

    def _refuse(self, reason: str) -> None:
        """No batch is kept from now on."""
        self.why_not, self._inputs, self._host = reason, None, None
        if self._position.rank == 0:
            self._context.reporter.notice(
                "note", f"no probe batch is kept: {reason}", {KEY: {"why": reason}}
            )

    # ── its value ─────────────────────────────────────────────────────────────────────────────

    def value(self) -> Optional[Any]:
        """Run it with the present weights.

        Returns:
            A float; a tensor of one float64 where it would have to be waited for; or None, for
            which `why_not` has the reason.
        """
        measurement = self._measure()
        return None if measurement is None else measurement[0]

    def _measure(self) -> Optional[tuple[Any, Optional[Any]]]:
        """Return the value, as `value` does, and the loss likewise."""
        if self._inputs is None:
            return None
        self.why_not = "its forward failed"
        output: Optional[tuple[Any, Optional[Any]]] = self._guard.run(self._part, self._run)
        return output

    def _run(self) -> Optional[tuple[Any, Optional[Any]]]:
        gate, inputs, root = self._context.gate, self._inputs, self._root()
        try:
            if root is None or inputs is None:
                raise side_forward.RefusedError("the model that it was kept of is gone")
            if gate.in_backward or gate.in_forward:
                raise side_forward.RefusedError("weights change inside of the backward")
            side_forward.check_runnable(self._context, root, self._compiled, alone=self._several)
            trials = self._sampler.trials
            self._drifts = trials.output_drifts(root, inputs)
            self._output.begin_run()
            self._look_on(self._output.add_logits)
            try:
                value, loss = trials.run(root, inputs, fixed=True, take=self._take)[-1]
            finally:
                self._look_on(None)
        except side_forward.NeverError as refusal:
            self._refuse(str(refusal))
            return None
        except side_forward.RefusedError as refusal:
            self.why_not = str(refusal)
            return None
        self.why_not = ""
        if not self._scalars.can_read_now(value):
            return value, loss
        return value.item(), None if loss is None else loss.item()

    def _take(self, output: Any) -> tuple[Any, Optional[Any]]:
        return output_value(self._torch, output), self._output.loss(output)

    # ── whose fault a loss is ─────────────────────────────────────────────────────────────────

    def do_check_weights(self, args: dict[str, Any]) -> dict[str, Any]:
        """The verb `check_weights`: the loss of these rows now, and at the newest savepoints.

        With `renew` other rows are kept from the next step on.
        On an accelerator it waits for that one number; the job would be taken back otherwise.

        Raises:
            Refused: there is none.
        """
        if not self._on:
            raise Refused("no probe batch is kept")
        measurement = self._measure()
        if measurement is None or measurement[1] is None:
            raise Refused(f"the probe batch tells nothing: {self.why_not or NO_LOSS}")
        answer = {
            "loss": float(measurement[1]),
            "was": [[step, float(loss)] for step, loss in self._known_losses()],
        }
        if args.get("renew"):
            self._renew()
        return answer

    def _known_losses(self) -> deque[tuple[int, Any]]:
        """Return the losses that the newest one is compared with."""
        return self._pair_losses if self._output.is_paired else self._losses

    def _renew(self) -> None:
        """Keep a batch of what comes in now: the job has other data to learn.

        What was measured on the old one is not compared any more.
        """
        self._serial += 1
        self._inputs, self._host, self._host_targets, self._written = None, None, None, False
        self._losses.clear()
        self._pair_losses.clear()
        self._output, self._many = ReferenceOutput(self._torch), None
        self._output_of_many = ReferenceOutput(self._torch, MANY_ROWS)
        self.why_not = UNSEEN
        self._sets.want()

    def explain_weights_doubt(self, before_step: int, within: float, sound: bool = False) -> str:
        """Return why the weights may be bad, "" where these rows show that they are good.

        Where these rows tell nothing, as with a loss of pairs, `sound` says whether they are.

        They are within `within` times the lower one of the losses at the newest two savepoints
        before `before_step`; two, since the newest may be from between a damage and its first sign.
        Only where the host has the loss: it is not waited for.
        """
        measurement = self._measure() if self._on else None
        losses = [loss for step, loss in self._losses if step < before_step]
        if sound and not (measurement and losses):
            return ""
        now = None if measurement is None or self._output.is_paired else measurement[1]
        if not isinstance(now, float):
            return f"the probe batch tells nothing: {self.why_not or NO_LOSS}"
        if not losses:
            return f"no savepoint of before step {before_step} has a loss of the probe batch"
        was = float(min(losses[-2:]))
        if now <= within * was:
            return ""
        return f"the weights are bad: the probe batch has a loss of {now:.4g}, and had {was:.4g}"

    def explain_savepoint_doubt(
        self, step: int, before_step: int, within: float, sound: bool
    ) -> str:
        """Return the same for the weights of the savepoint of `step`, by its own loss."""
        now = next((float(loss) for loss_step, loss in self._losses if loss_step == step), None)
        losses = [
            float(loss)
            for earlier_step, loss in self._losses
            if earlier_step < min(before_step, step)
        ]
        if now is None or not losses:
            return "" if sound else f"the probe batch has no loss of step {step}, or none of before"
        was = min(losses[-2:])
        return "" if now <= within * was else f"the probe batch has a loss of {now:.4g} there"

    # ── savepoints and checkpoints ────────────────────────────────────────────────────────────

    def add_value_to(
        self, state: dict[str, Any], previous_weights: Callable[[], Iterable[tuple[Any, Any]]]
    ) -> None:
        """Add the value to the counters of a savepoint that is about to be taken.

        Args:
            previous_weights: gives the weights, each with its copy in the savepoint before.
        """
        measurement = self._measure() if self._on else None
        if measurement is None:
            return
        # Arrives before the copies of the savepoint, which are queued after it.
        self._values += 1
        if isinstance(measurement[0], float) and not self._drifts and self._is_rerun_due():
            self._rerun(measurement[0])
        value, loss = (
            v if isinstance(v, (float, type(None))) else self._to_host(v, []) for v in measurement
        )
        state[KEY], state[SERIAL] = value, self._serial
        if loss is not None:
            self._known_losses().append((self._position.step - 1, loss))
        reported = None if self._output.is_paired else measurement[1]
        self._guard.run(
            self._part, self._context.gate.call_without_grad, self._report_output, reported
        )
        is_compared = isinstance(loss, float) and not self._output.is_paired
        if is_compared and not self._several and not self._drifts:
            compare = partial(self._compare_weights, previous_weights)
            self._guard.run(self._part, self._context.gate.call_without_grad, compare)

    def _is_rerun_due(self) -> bool:
        early = self._values in (2, 4)
        return self._proofs >= 0 and (early or self._values % RERUN_EVERY == 0)

    def _rerun(self, value: float) -> None:
        """Run it again: where that has always given the same, another value is a fault."""
        again = self.value()
        if not isinstance(again, float):
            return
        mismatch = abs(again - value)
        if self._proofs < PROOFS:
            self._proofs = self._proofs + 1 if mismatch == 0.0 else -1
        else:
            self._extra["rerun_mismatch"] = mismatch

    def value_of_savepoint(self, state: Mapping[str, Any]) -> Optional[Any]:
        """Return the value among the counters of a savepoint; None if it is of another batch."""
        return state.get(KEY) if state.get(SERIAL, 0) == self._serial else None

    def _report_output(self, loss: Optional[Any]) -> None:
        """Let what was found join the next frame."""
        if loss is not None:
            self._extra["fixed_probe_loss"] = loss
        for name, value in self._output.describe().items():
            self._extra[name] = self._scalars.value(value)

    def _compare_weights(self, before: Callable[[], Iterable[tuple[Any, Any]]]) -> None:
        """Look for a weight that moved alone, and run rows of the batch with it and its old value.

        The two losses differ by that weight only, so that the batch's own noise is not in it.
        """
        lone = weights_check.find_lone_weight(self._torch, before())
        if lone is None:
            return
        self._extra["lone_weight"] = lone.times
        if lone.times < weights_check.LONE_LIMIT:
            return
        root: Any = self._root()
        inputs: Any = self._many or self._inputs
        output = self._output if self._many is None else self._output_of_many
        run = partial(self._sampler.trials.run, root, inputs, fixed=True, take=output.loss)
        (now,) = run()
        with weights_check.with_old_weight(lone):
            (was,) = run()
        if now is None or was is None:
            return
        now, was = float(now), float(was)
        # Of rows that the model knows by heart the loss is near 0, and means nothing.
        least = max(abs(was), abs(self._history.newest_loss or 0.0))
        if least > 0.0 and abs(now - was) < float("inf"):
            self._extra["lone_weight_harm"] = (now - was) / least

    def save_facts(self) -> dict[str, Any]:
        """Return the batch's part in the notice of a checkpoint just saved: empty when off."""
        if not self._on:
            return {}
        facts = {"why": DRIFTS}  # a new process compares after its first forward
        if not self._drifts and self._times.had_forward_since_step():
            facts = {"why": NO_BACKWARD}
        elif not self._drifts:
            value = self.value()
            facts = facts if self._drifts else self._facts(value)
        return {EVALUATION if self._several else KEY: facts}

    def _facts(self, value: Optional[Any]) -> dict[str, Any]:
        if value is None:
            return {"why": self.why_not or UNSEEN}
        root = self._root()
        self._arrivals = [arrival for arrival in self._arrivals if not arrival.query()]
        ready = root is not None and self._inputs is not None and not self._arrivals
        if ready and not self._written:
            self._written = True
            host = (*self._host, self._host_targets)
            self._background.do(self._write, self._inputs, host, _signature(root))
        if root is not None and not self._structure:
            self._structure = {"no_model": "it cannot be written"}
            self._guard.run(self._part, self._write_structure, root)
        return {"path": self._path, "value": float(value), **self._structure}

    def _write_structure(self, root: Any) -> None:
        """Pickle the model in this step, 3 ms of a small one; the thread writes it."""
        optimizers = list(self._context.registry.optimizers)
        try:
            data = pickle_structure(self._torch, root, optimizers)
        except StructureError as error:
            self._structure = {"no_model": str(error)[:REASON]}
            return
        digest = hashlib.sha256(data).hexdigest()[:DIGEST]
        path = os.path.join(os.path.dirname(self._path), f"structure.{digest}.pkl")
        self._structure = {"model": digest}
        self._background.do(_write_file, path, data)

    def compare_after_rollback(self, state: Mapping[str, Any], step: int) -> None:
        """Compare after a rollback to the savepoint of `step` with these counters."""
        if self._on:
            self._output.forget()
            for losses in (self._losses, self._pair_losses):
                while losses and losses[-1][0] > step:
                    losses.pop()
            why_not = self.why_not or (OTHER if self._serial else UNSEEN)
            self._compare(self.value_of_savepoint(state), why_not, SAME)

    # ── a checkpoint of an earlier process ────────────────────────────────────────────────────

    def before_first_update(self) -> None:
        """Compare while the weights are still the checkpoint's."""
        if self._compares:
            if self._position.step != self._context.config.first_step:
                self._compares = False  # the job did not load the checkpoint, which is reported
            else:
                self._compare_resumed()

    def _compare_resumed(self) -> None:
        """Compare: the job stands where the checkpoint was saved."""
        settings = self._given or {}
        if self._inputs is None and settings.get("path"):
            content = self._guard.run(self._part, self._read, str(settings["path"]))
            if content is False:
                self._report({"verdict": "not judged", "why": NO_MODEL})
                return  # the model may come with the next optimizer
        self._compares = False
        if self._inputs is None:
            self._sets.want()
        close = CLOSE if self._inputs is not None and self._may_round_differently() else SAME
        self._compare(settings.get("value"), str(settings.get("why", UNSEEN)), close)

    def _may_round_differently(self) -> bool:
        """Whether another process may round differently: half precision, or a device whose kernels
        are chosen by speed."""
        torch, root, inputs = self._torch, self._root(), self._inputs
        types = {p.dtype for p in root.parameters()} if root is not None else set()
        cuda = any(p.is_cuda for p in root.parameters()) if root is not None else False
        autocast = inputs is not None and inputs.autocast
        return cuda or autocast or bool(types & {torch.float16, torch.bfloat16})

    def _compare(self, was: Optional[Any], unknown: str, close: float) -> None:
        """Compare, and report the result."""
        now = self.value() if was is not None else None
        if was is None or now is None:
            self._report({"verdict": "not judged", "why": unknown if was is None else self.why_not})
            return
        was, now = float(was), float(now)
        verdict = "equal" if is_close(was, now, close) else "differs"
        self._report({"verdict": verdict, "was": was, "is": now})

    def _report(self, result: dict[str, Any]) -> None:
        self._history.set_reference_result(result)

    # ── the file ──────────────────────────────────────────────────────────────────────────────

    def _write(self, inputs: side_forward.Inputs, host: Any, kind: list[Any]) -> None:
        torch = self._torch
        places: list[str] = []
        side_forward.map_tensors(
            torch, (inputs.args, inputs.kwargs), lambda t: places.append(str(t.device))
        )
        document = {
            "what": WHAT,
            "model": kind,
            "args": host[0],
            "kwargs": host[1],
            "targets": None if host[2] is None else tuple(host[2]),
            "places": places,
            "device": inputs.device,
            "autocast": inputs.autocast,
            "dtype": inputs.dtype,
            "modes": list(inputs.modes),
        }
        weights_check.write_rows(torch.save, document, self._path)

    def _read(self, path: str) -> bool:
        """Read the batch of an earlier process; return whether there is a model for it."""
        torch = self._torch
        try:
            document = weights_check.read_rows(torch.load, path)
            if document["what"] != WHAT:
                raise ValueError("it is not a probe batch")
            places = iter(document["places"])
            inputs = document["args"], document["kwargs"]
            args, kwargs = side_forward.map_tensors(
                torch, inputs, lambda tensor: tensor.to(next(places))
            )
            known_targets = document.get("targets")
            targets = known_targets and Targets(
                known_targets[0].to(document["places"][0]), *known_targets[1:]
            )
        except Exception as error:
            self._refuse(f"{path} cannot be read: {error}")
            return True
        root = next(
            (r for r in self._context.registry.roots() if _signature(r) == document["model"]), None
        )
        if root is None:
            return False
        self._compiled = self._sampler.may_be_compiled(root, False)
        self._root, self._path, self._written = weakref.ref(root), path, True
        under = {name: document[name] for name in ("device", "autocast", "dtype")}
        self._inputs = side_forward.Inputs(args, kwargs, modes=tuple(document["modes"]), **under)
        self._output.targets = targets
        return True


def _write_file(path: str, data: bytes) -> None:
    files.make_directory(os.path.dirname(path))
    files.replace_file(path, data)


def _signature(root: Any) -> list[Any]:
    """What identifies a model in another process: its class, its modules and parameters."""
    sizes = [parameter.numel() for parameter in root.parameters()]
    return [type(root).__qualname__, sum(1 for _ in root.modules()), len(sizes), sum(sizes)]
