"""`python -I evaluation.py < request.json`: the model of a checkpoint, proved and measured.

The model is rebuilt (`rebuild`), and proved by the probe batch: what the job had for it when it
saved comes out here as well. Unproved, nothing is measured. Measured are the probe batch and
windows of token files, without dropout, and what has changed since the checkpoint before; at last
each part of the checkpoint is restored. The answer is one JSON line, see `evaluate`.

It runs in the job's interpreter, on one thread of the CPU, at the lowest priority, within the
memory and the time of the request, and is the first that the kernel kills where memory ends.

Sources: Hutchinson's estimate of a trace (1989), by central differences of gradients; bits of the
model over those of zlib, Carlini et al., arXiv:2012.07805; items as context of each other, CoDeC.
"""

import array
import hashlib
import json
import math
import os
import random
import signal
import stat
import sys
import time
import zlib
from collections import Counter
from contextlib import suppress
from statistics import median
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Optional

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

sys.path.append(ROOT)  # for the next import only: other packages there are not the job's
try:
    from supervise_offline import TokenIndex, find_torch, keep_slices, rebuild, renice_self, verify
    from supervise_offline.generation import EARLIER, SEED, TEXTS, Harness, TextModel, compare_rates
    from supervise_offline.mechanisms import trace_of_hessian
    from supervise_offline.rebuild import FAILED, RESTORED, UNKNOWN, UnknownError
finally:
    sys.path.remove(ROOT)

EXACT, ROUNDED = 1e-5, 0.02  # of one CPU; of half precision or a device, in nat; project defaults
TOXICITY = "rtp_toxicity_prob"  # in percent; benchmarks are shares, as jobs report them
TOP = 10  # tokens that are compared, the likeliest
LOGITS = 1 << 20  # numbers of outputs that are kept
HASH_DIGITS = 13  # hexadecimal ones of a hash that are its number: 52 bits, exact as a float
FIRST = 1024  # tokens that say whether a file is of uint16
KNOWS_LITTLE = "the model knows no more of its tokens than how often each comes"
RATIOS = 1000  # windows whose lowest thousandth is one at least
# Of `codec_score`: items at most and at least, others before one, and its least tokens; defaults.
# A small model had 79 % on unseen code while its loss was still falling, and 95 on what it knew by
# heart: where the text right before an item does not help either, others say nothing.
HURT = 0.4
ITEMS, FEWEST_ITEMS, OTHERS, ITEM = 200, 30, 3, 16
FEWEST = 8  # windows that a comparison needs
DIRECTIONS = 8  # of the curvature
COST = 6  # forward passes of a direction
HALF = ("float16", "bfloat16")
VERSION = 1  # of how numbers are made of the same windows


class ProofError(UnknownError):
    """The model here has something else for the probe batch than it had in the job."""

    def __init__(self, text: str, was: float, now: float) -> None:
        super().__init__(text)
        self.both = {"was": was, "now": now}


class Batch(NamedTuple):
    """The probe batch, as the probe wrote it.

    Attributes:
        targets: its labels, what each stands for as `Targets` of the probe; None if unknown.
        ids: its token ids, (rows, positions); None where the model takes none.
    """

    args: Any
    kwargs: Any
    targets: Any
    document: Mapping[str, Any]
    ids: Any


class Slice(NamedTuple):
    """Windows of a file of tokens, in the order in which they are evaluated.

    Attributes:
        read: (start, count) to tokens. starts: of the windows.
        length: tokens of a window, less the last one's target. kind: of a token in the file, as of
            `array`.
    """

    read: Callable[[int, int], list[int]]
    starts: list[int]
    length: int
    kind: str

    def windows(self, begin: int, end: int) -> list[list[int]]:
        return [self.read(start, self.length + 1) for start in self.starts[begin:end]]

    def bits(self, count: int) -> list[int]:
        """Return how many bits zlib needs for the targets of each of the first windows."""
        several = (array.array(self.kind, tokens[1:]) for tokens in self.windows(0, count))
        return [8 * len(zlib.compress(tokens.tobytes(), 9)) for tokens in several]

    def entropy(self, count: int) -> float:
        """Return the entropy, in nat, of how often each token comes in the first windows."""
        counts = Counter(token for tokens in self.windows(0, count) for token in tokens)
        total = sum(counts.values())
        return sum(-n / total * math.log(n / total) for n in counts.values())

    def digest(self) -> str:
        """Return the SHA-256 of all windows."""
        sha = hashlib.sha256()
        for number in range(len(self.starts)):
            sha.update(array.array("I", self.windows(number, number + 1)[0]).tobytes())
        return sha.hexdigest()


def read_batch(torch: Any, path: str) -> Batch:
    """Read a probe batch. Raises OSError, verify.NeedsCode, verify.Damaged."""
    document = verify.load_object(torch, path, zipped=True)
    args, kwargs = document["args"], document["kwargs"]
    integers = [t for t in _tensors(torch, (args, kwargs)) if t.dtype == torch.int64]
    ids = next((t for t in integers if t.dim() == 2 and t.shape[1] > 1), None)
    return Batch(args, kwargs, document.get("targets"), document, ids)


def _tensors(torch: Any, value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (dict, list, tuple)):
        inner = value.values() if isinstance(value, dict) else value
        return [tensor for item in inner for tensor in _tensors(torch, item)]
    return []


def _mapped(torch: Any, value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(torch, item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(torch, item, change) for item in value)
    return value


class SeenLosses:
    """What the model takes `cross_entropy` of: it may return its loss alone.

    To be made before modules of the job are imported, which may import that function by name.
    """

    def __init__(self, torch: Any) -> None:
        self.pairs: list[tuple[Any, Any, int]] = []  # logits by position, targets, what is ignored
        functional = torch.nn.functional
        take = functional.cross_entropy

        def cross_entropy(input: Any, target: Any, *args: Any, **options: Any) -> Any:
            if input.dim() > 1 and target.dtype == torch.int64:
                logits = input.movedim(1, -1).reshape(-1, input.shape[1])
                ignored = int(options.get("ignore_index", -100))
                self.pairs.append((logits.detach(), target.detach().reshape(-1), ignored))
            return take(input, target, *args, **options)

        functional.cross_entropy = cross_entropy
        self.take = take


class Evaluation:
    """One rebuilt model and its batch."""

    def __init__(
        self, torch: Any, model: Any, batch: Batch, seen: SeenLosses, until_s: float
    ) -> None:
        self._torch, self._model, self._batch = torch, model, batch
        self._seen, self._until_s = seen, until_s
        self._forward_s = 0.0
        self._slices: dict[str, Slice] = {}
        self._classes, self._own = 0, list[Any]()  # of the probe batch; 0: unknown
        self._texts: Optional[TextModel] = None
        self.values: dict[str, float] = {}
        self.errors: dict[str, float] = {}
        self.unmeasured: dict[str, str] = {}
        self.artefact: dict[str, Any] = {}

    # ── proof ─────────────────────────────────────────────────────────────────────────────────

    def prove(self, was: float) -> float:
        """Return what the job had as `was`, of the model as it is here.

        Raises:
            ProofError: it differs.
        UnknownError: it cannot be the same.
        """
        document, modules = self._batch.document, list(self._model.modules())
        modes = document["modes"][-len(modules) :]
        for module, mode in zip(modules, modes):
            module.training = mode
        on_cpu = document["device"] == "cpu"
        kinds = {str(p.dtype).rpartition(".")[2] for p in self._model.parameters()}
        exact = on_cpu and not document["autocast"] and not kinds & set(HALF)
        if not on_cpu:
            self._model.float()
        began = time.monotonic()
        now = self._value(SEED)
        self._forward_s = time.monotonic() - began
        if not on_cpu and now != self._value(SEED + 1):
            raise UnknownError(
                "the model draws random numbers in training, and a device draws others than the CPU"
            )
        if not (math.isfinite(was) or math.isfinite(now)):
            raise UnknownError("the probe batch has no finite value, here as in the job")
        close = EXACT * abs(was) if exact else ROUNDED * max(1.0, abs(was))
        if not abs(now - was) <= close:
            raise ProofError(
                f"the probe batch has {now:.6g} with the weights of the file, and had {was:.6g} in "
                "the job when it was saved: they are other weights, or the model is another one",
                was,
                now,
            )
        return now

    def _value(self, seed: int) -> float:
        """As the probe's `output_value`: a loss, else the mean square of the first output."""
        outputs = self._floating(self._run(self._batch.args, self._batch.kwargs, seed))
        loss = next((v for v in outputs if v.numel() == 1), None)
        return float(outputs[0].double().square().mean() if loss is None else loss)

    def _run(self, args: Any, kwargs: Any, seed: int = SEED) -> Any:
        torch, document = self._torch, self._batch.document
        torch.default_generator.manual_seed(seed)  # the CPU's alone: others are not used, and cost
        for name in ("numpy.random", "random"):
            if name in sys.modules:
                sys.modules[name].seed(seed)
        inputs = _mapped(torch, (args, kwargs), torch.clone)
        self._seen.pairs.clear()
        on = document["autocast"] and document["device"] == "cpu"
        with torch.no_grad(), torch.autocast("cpu", document["dtype"], enabled=bool(on)):
            return self._model(*inputs[0], **inputs[1])

    def _floating(self, output: Any) -> list[Any]:
        several = _tensors(self._torch, output)
        return [t for t in several if t.is_floating_point() and t.numel()]

    # ── probe batch ───────────────────────────────────────────────────────────────────────────

    def measure_batch(self, before: Mapping[str, Any]) -> Any:
        """Measure the probe batch, and how far its outputs are from those of the checkpoint before.

        Returns:
            Their log-probabilities to keep, None where they are none.
        """
        torch = self._torch
        self._model.eval()
        output = self._run(self._batch.args, self._batch.kwargs)
        loss = self._loss(output)
        if loss is None:
            self.unmeasured["checkpoint_probe_loss"] = "what loss the model has is not known"
        else:
            self.values["checkpoint_probe_loss"] = float(loss)
            self.values["checkpoint_probe_ppl"] = math.exp(min(700.0, float(loss)))
        logits = self._logits(output)
        if logits is None:
            self.unmeasured["checkpoint_entropy"] = "the outputs are no logits of tokens"
            return None
        rows = max(1, min(len(logits), LOGITS // logits.shape[-1]))
        kept = logits[torch.linspace(0, len(logits) - 1, rows).long()].double().log_softmax(-1)
        self.values["checkpoint_entropy"] = float(-(kept.exp() * kept).nan_to_num().sum(-1).mean())
        logs, inputs = before.get("logs"), before.get("inputs")
        if logs is None:
            return kept.float()
        if inputs is None or not same_tensors(torch, self.inputs, inputs):
            reason = "the probe batch is another one than at the checkpoint before"
            self.unmeasured["checkpoint_kl_to_prev"] = reason
        elif logs.shape == kept.shape:
            earlier = logs.double()
            self.values["checkpoint_kl_to_prev"] = float(
                (earlier.exp() * (earlier - kept)).nan_to_num().sum(-1).mean()
            )
            top = min(TOP, kept.shape[-1] // 2)
            ours, theirs = (v.topk(top, -1).indices for v in (kept, earlier))
            shared = (ours.unsqueeze(-1) == theirs.unsqueeze(-2)).any(-1).double().mean()
            self.values["checkpoint_top_agreement"] = 100.0 * float(shared)
        return kept.float()

    def _loss(self, output: Any) -> Any:
        """Return the model's own loss, else the one that the job took of its logits, or None."""
        targets, outputs = self._batch.targets, self._floating(output)
        loss = next((v for v in outputs if v.numel() == 1), None)
        if loss is not None or targets is None or not outputs:
            return loss
        rows, classes, ignored = targets[:3]
        logits = outputs[0].float()
        if logits.shape[-1] == classes and rows.dim() == 1:
            logits = logits.reshape(-1, classes)
        batch, sampled = targets[3:]
        ids = self._batch.ids
        sequences = len(outputs[0] if ids is None else ids)
        if len(logits) * batch >= 2 * sampled * min(sequences, batch):  # as the probe's `_matched`
            count = min(len(rows), len(logits))  # a loss in chunks has fewer targets
            logits, rows = logits[:count], rows[:count]
        else:  # of a loss that is shifted outside of the model the rows do not match
            rows = rows[: sampled // batch * sequences]
        if logits.shape[1] != classes or (logits.shape[0], *logits.shape[2:]) != rows.shape:
            return None
        return self._seen.take(logits, rows, ignore_index=ignored)

    def _logits(self, output: Any) -> Any:
        """Return the logits of the newest run by position, None where there are none."""
        ids, targets, pairs = self._batch.ids, self._batch.targets, self._seen.pairs
        if pairs:
            return self._torch.cat([p[0] for p in pairs if p[0].shape[1] == pairs[0][0].shape[1]])
        for value in self._floating(output):
            of_ids = ids is not None and value.dim() == 3 and value.shape[1] == ids.shape[1]
            if of_ids or (targets and value.dim() > 1 and value.shape[-1] == targets[1]):
                return value.reshape(-1, value.shape[-1])
        return None

    def _row_losses(self, output: Any, window: Any) -> list[float]:
        """Return the mean loss of each row of tokens, or one of all where that cannot be told."""
        logits, pairs = self._logits(output), self._seen.pairs
        targets, ignored = window[:, 1:].reshape(-1), -100
        if pairs:
            targets, ignored = self._torch.cat([p[1] for p in pairs])[: len(logits)], pairs[0][2]
        losses = self._seen.take(logits.float(), targets, ignore_index=ignored, reduction="none")
        rows, known = len(window), targets != ignored
        losses = losses.double() * known
        if len(losses) % rows or len(pairs) > 1:
            return [float(losses.sum() / known.sum())]
        sums = losses.view(rows, -1).sum(1) / known.view(rows, -1).sum(1)
        return [float(value) for value in sums]

    @property
    def inputs(self) -> list[Any]:
        """The tensors of the probe batch, in order."""
        return _tensors(self._torch, (self._batch.args, self._batch.kwargs))

    # ── held-out tokens ───────────────────────────────────────────────────────────────────────

    def open_slices(
        self,
        slices: Mapping[str, str],
        tokens: int,
        tokenizer: str = "",
        index: str = "",
        conditions: Optional[Mapping[str, Any]] = None,
    ) -> str:
        """Open the files of tokens, and see what their numbers will depend on but for the weights.

        Args:
            tokens: of each file, at most. tokenizer, index: their files, "" where none is named.
            conditions: of the harness, None without one.

        Returns:
            The SHA-256 of its canonical JSON, "" where a part of it cannot be read.
        """
        digests: dict[str, str] = {}
        reason = ""
        for name, path in slices.items():
            try:
                opened = self._open(path, tokens)
                digest = opened.digest()
            except Exception as error:  # of the job's code too
                self.unmeasured[f"checkpoint_val_loss.{name}"] = why = explain(error)
                reason = reason or f"{name}: {why}"
                continue
            self._slices[name], digests[name] = opened, digest
        document, ids = self._batch.document, self._batch.ids
        kinds = sorted({str(p.dtype).rpartition(".")[2] for p in self._model.parameters()})
        if document["autocast"] and document["device"] == "cpu":
            kinds.append(f"autocast {document['dtype']}")
        self.artefact = {
            "version": VERSION,
            "dtype": " ".join(kinds),
            "tokens": tokens,
            "window": int(ids.shape[1]) if digests else 0,
            "tokenizer": "",
            "index": "",
            "windows": digests,
        }
        if conditions:
            self.artefact["harness"] = hash_document(conditions)
        try:
            self.artefact["tokenizer"] = digest_of(tokenizer) if tokenizer else ""
            self.artefact["index"] = TokenIndex(index).digest if index else ""
        except (OSError, ValueError) as error:
            reason = reason or explain(error)
        if reason:
            self.unmeasured["eval_artifact_hash"] = reason
            return ""
        digest = hash_document(self.artefact)
        self.values["eval_artifact_hash"] = float(int(digest[:HASH_DIGITS], 16))
        return digest

    def _changes(self, name: str, before: Mapping[str, Any]) -> list[str]:
        """Return in what a slice was evaluated otherwise at the checkpoint before."""
        sides = [dict(d) for d in (self.artefact, before.get("artefact") or {})]
        for side in sides:
            side |= {"windows": side.get("windows", {}).get(name), "index": "", "harness": ""}
        return [key for key, value in sides[0].items() if value != sides[1].get(key)]

    def measure_slices(self, before: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Measure each file of tokens; return its losses and the limit of its ratios, to keep."""
        kept: dict[str, Any] = {}
        limits: dict[str, float] = {}
        worst = 0.0, 0.0
        for number, (name, opened) in enumerate(self._slices.items()):
            share = (self._until_s - time.monotonic()) / 2.0 / (len(self._slices) - number)
            try:
                losses, count = self._losses(opened, time.monotonic() + share)
            except Exception as error:  # of the job's code too
                self.unmeasured[f"checkpoint_val_loss.{name}"] = explain(error)
                continue
            kept[name] = losses
            self.values[f"checkpoint_val_loss.{name}"] = float(losses.mean())
            if len(losses) >= FEWEST:
                spread = float(losses.std()) / math.sqrt(len(losses))
                self.errors[f"checkpoint_val_loss.{name}"] = spread
            earlier = before.get("windows", {}).get(name)
            changes = self._changes(name, before)
            limit = None if changes else before.get("ratios", {}).get(name)
            several = losses if len(losses) == count else []
            limits |= self._measure_ratios(name, opened, several, limit)
            if earlier is not None and changes:
                self.unmeasured[f"checkpoint_val_rise.{name}"] = (
                    f"the checkpoint before was evaluated with other {', '.join(changes)}"
                )
                continue
            count = 0 if earlier is None else min(len(earlier), len(losses))
            if count >= FEWEST:
                rise = losses[:count] - earlier[:count]
                spread = float(rise.std()) / math.sqrt(count)
                worst = max(worst, (float(rise.mean()) / max(spread, 1e-12), float(rise.mean())))
                self.values["checkpoint_val_rise_z"] = self.values["checkpoint_val_rise"] = 0.0
        if worst[1] > 0.0:
            self.values["checkpoint_val_rise_z"], self.values["checkpoint_val_rise"] = worst
        if kept:
            means = [float(losses.mean()) for losses in kept.values()]
            self.values["checkpoint_val_loss"] = mean = sum(means) / len(means)
            self.values["checkpoint_val_ppl"] = math.exp(min(700.0, mean))
        self._take_largest("zlib_ratio")
        return {"windows": kept, "ratios": limits}

    def _take_largest(self, metric: str) -> None:
        several = [v for name, v in self.values.items() if name.startswith(f"{metric}.")]
        if several:
            self.values[metric] = max(several)

    def _measure_ratios(
        self, name: str, opened: Slice, losses: Any, limit: Optional[float]
    ) -> dict[str, float]:
        """Measure the share of windows for which the model needs unusually few bits.

        Args:
            losses: by window, empty where they cannot be told apart.
            limit: of the first evaluation, None in it.

        Returns:
            The limit by name, to keep; empty if it is not known.
        """
        metric = f"zlib_ratio.{name}"
        if len(losses) < RATIOS:
            self.unmeasured[metric] = (
                f"{len(losses):,} windows with a loss of their own, and their lowest thousandth "
                f"takes {RATIOS:,}: `tokens` may be more"
            )
            return {} if limit is None else {name: limit}
        if limit is None and float(losses.mean()) > opened.entropy(len(losses)):
            self.unmeasured[metric] = KNOWS_LITTLE
            return {}
        ratios = [
            float(loss) / math.log(2.0) * opened.length / bits
            for loss, bits in zip(losses, opened.bits(len(losses)))
        ]
        distances = distances_from_median(ratios)
        if limit is None:
            limit = sorted(distances)[len(distances) // RATIOS]
        self.values[metric] = 100.0 * sum(d < limit for d in distances) / len(distances)
        return {name: limit}

    def _look_at_batch(self) -> None:
        """See the classes of its outputs, and its labels. Raises UnknownError."""
        if self._batch.ids is None:
            raise UnknownError("the model takes no token ids")
        if not self._classes:
            logits = self._logits(self._run(self._batch.args, self._batch.kwargs))
            if logits is None or 2 * len(logits) < self._batch.ids.numel():
                raise UnknownError("the model gives no logits of each position")
            self._classes = int(logits.shape[-1])
            self._own = [targets for _, targets, _ in self._seen.pairs]

    def _open(self, path: str, tokens: int) -> Slice:
        """Choose windows of a file, as long as those of the probe batch."""
        self._look_at_batch()
        torch, (rows, length) = self._torch, self._batch.ids.shape
        kind, read, total = open_tokens(path, self._classes)
        room = (total - 1) // length
        if room < rows:
            raise UnknownError(f"{path} has {total:,} tokens, and a batch {rows} x {length}")
        count = max(rows, min(room, tokens // length) // rows * rows)
        chance = torch.Generator().manual_seed(SEED)
        # Spread over the file, in an order in which any number of the first are spread, too.
        order = torch.randperm(count, generator=chance).tolist()
        starts = [place * (room - 1) // max(1, count - 1) * length for place in order]
        return Slice(read, starts, length, kind)

    def _losses(self, opened: Slice, until_s: float) -> tuple[Any, int]:
        """Return the mean loss of each window, or of the windows of a batch; and of how many.

        Of as many as there is time for.
        """
        torch, ids = self._torch, self._batch.ids
        losses: list[float] = []
        count = 0
        for start in range(0, len(opened.starts), len(ids)):
            if losses and time.monotonic() > until_s:
                break
            window = torch.tensor(opened.windows(start, start + len(ids)))
            losses += self._row_losses(self._run_window(window), window)
            count += len(ids)
        return torch.tensor(losses, dtype=torch.float64), count

    def _run_window(self, window: Any) -> Any:
        """Return what the model gives for rows of tokens, each one longer than those it takes."""
        torch = self._torch
        output = self._run(*self._with_tokens(window))
        taken = [targets for _, targets, _ in self._seen.pairs]
        own, is_batch = self._own, torch.equal(window[:, :-1], self._batch.ids)
        if own and not is_batch and same_tensors(torch, own, taken):
            raise UnknownError("the labels that the model takes are not its tokens")
        return output

    def _with_tokens(self, window: Any) -> Any:
        """Return the arguments of the batch with other tokens, and labels alike."""
        torch, ids = self._torch, self._batch.ids

        def change(tensor: Any) -> Any:
            if tensor.shape != ids.shape or tensor.dtype != ids.dtype:
                return tensor
            if tensor is ids or bool(((tensor == ids) | (tensor < 0)).all()):
                return window[:, :-1]
            same = tensor[:, :-1] == ids[:, 1:]
            return window[:, 1:] if bool((same | (tensor[:, :-1] < 0)).all()) else tensor

        return _mapped(torch, (self._batch.args, self._batch.kwargs), change)

    # ── items of one file as context of each other ────────────────────────────────────────────

    def measure_contexts(self) -> None:
        """Measure of each file how often other items of it make the loss of one greater.

        What was learnt by heart needs no context, which only disturbs; else it shows the kind.
        """
        for number, (name, opened) in enumerate(self._slices.items()):
            share = (self._until_s - time.monotonic()) / 3.0 / (len(self._slices) - number)
            try:
                score = self._disturbed(opened, time.monotonic() + share)
                self.values[f"codec_score.{name}"] = score
            except Exception as error:  # of the job's code too
                self.unmeasured[f"codec_score.{name}"] = explain(error)
        self._take_largest("codec_score")

    def _disturbed(self, opened: Slice, until_s: float) -> float:
        """Return the share of items, in percent, whose loss is greater behind three others."""
        rows, room = len(self._batch.ids), opened.length + 1
        size = room // (OTHERS + 1)
        if size < ITEM:
            raise UnknownError(f"four items of {ITEM} tokens are more than {room}, its context")
        windows = opened.windows(0, ITEMS)
        items = [window[OTHERS * size : (OTHERS + 1) * size] for window in windows]
        chance = random.Random(SEED)
        alone, behind, inside = list[float](), list[float](), list[float]()
        for begin in range(0, len(items) // rows * rows, rows):
            if time.monotonic() > until_s:
                break
            pairs = []
            for number, item in enumerate(items[begin : begin + rows], begin):
                several = chance.sample([*items[:number], *items[number + 1 :]], OTHERS)
                before = [token for other in several for token in other]
                rest = before[: room - len(before) - size]
                pairs.append((item + before + rest, before + item + rest))
            alone += self._item_losses([window for window, _ in pairs], 0, size)
            behind += self._item_losses([window for _, window in pairs], OTHERS * size, size)
            inside += self._item_losses(windows[begin : begin + rows], OTHERS * size, size)
        if len(alone) < FEWEST_ITEMS:
            raise UnknownError(
                f"{len(alone)} items in the file or in the time, and {FEWEST_ITEMS} are needed"
            )
        if sum(alone) / len(alone) > opened.entropy(len(items)):
            raise UnknownError(KNOWS_LITTLE)
        hurt = sum(i > a for i, a in zip(inside, alone)) / len(alone)
        if hurt > HURT:
            raise UnknownError(
                f"the text that stands before an item makes {100.0 * hurt:.0f} % of them worse: "
                "the model makes no use of a context yet"
            )
        return 100.0 * sum(b > a for a, b in zip(alone, behind)) / len(alone)

    def _item_losses(self, windows: list[list[int]], start: int, size: int) -> list[float]:
        """Return the mean loss of an item in each window, behind its first half.

        There it matters little what it was joined to.
        """
        logits, targets = self._position_logits(self._torch.tensor(windows))
        losses = self._seen.take(logits.movedim(2, 1), targets, reduction="none")
        return [float(v) for v in losses[:, start + size // 2 : start + size - 1].double().mean(1)]

    def _position_logits(self, window: Any) -> tuple[Any, Any]:
        """Return the logits by row and position, without some at the end, and their targets."""
        logits, pairs = self._logits(self._run_window(window)), self._seen.pairs
        targets = window[:, 1 : 1 + len(logits) // len(window)]
        taken = self._torch.cat([p[1] for p in pairs]) if pairs else targets.reshape(-1)
        if len(logits) != targets.numel() or not self._torch.equal(taken, targets.reshape(-1)):
            raise UnknownError("the loss of each token is not known")
        return logits.float().view(*targets.shape, -1), targets

    # ── what it says by itself ────────────────────────────────────────────────────────────────

    def measure_memory(self, path: str, texts: int = TEXTS) -> None:
        """Measure how much of what the model says is copied from the data of its training.

        Args:
            path: of the index, "" for none. texts: at most.
        """
        if not path:
            return
        try:
            share = (self._until_s - time.monotonic()) / 2.0
            index = TokenIndex(path)
            until_s = time.monotonic() + share
            rate = self._text_model().copied_share(index, texts, until_s)
            self.values["memorization_rate"] = 100.0 * rate
        except Exception as error:  # of the job's code too
            self.unmeasured["memorization_rate"] = explain(error)

    def _text_model(self) -> TextModel:
        self._look_at_batch()
        if self._texts is None:
            shape = self._batch.ids.shape
            self._texts = TextModel(self._torch, self._position_logits, shape, self._classes)
        return self._texts

    def start_harness(self, request: Mapping[str, Any]) -> Optional[Harness]:
        """Start the process that benchmarks and toxicity need, None without one."""
        named = request.get("harness") or {}
        if not named:
            return None
        try:
            about = {**named, "tokenizer": request.get("tokenizer")}
            return Harness(named["command"], about, self._until_s)
        except Exception as error:  # it may be another interpreter
            self.unmeasured.update(dict.fromkeys(named["metrics"], explain(error)))
            return None

    def measure_rates(
        self, harness: Optional[Harness], before: Mapping[str, Any]
    ) -> dict[str, list[list[float]]]:
        """Let the harness measure shares of questions and prompts; return the newest of each."""
        changed = [
            key
            for key in ("harness", "tokenizer", "dtype")
            if (before.get("artefact") or {}).get(key, "") != self.artefact.get(key, "")
        ]
        earlier = {} if changed else dict(before.get("rates", {}))
        if harness is None:
            return earlier
        try:
            until_s = self._until_s - (self._until_s - time.monotonic()) / 2.0
            message = harness.run(self._text_model(), until_s)
        except Exception as error:  # of the job's code too
            self.unmeasured.update(dict.fromkeys(harness.metrics, explain(error)))
            return earlier
        finally:
            harness.close()
        self.unmeasured.update(message["unmeasured"])
        rates = message["rates"]
        for name, (share, number) in rates.items():
            unit = 100.0 if name == TOXICITY else 1.0
            self.values[name] = unit * share
            self.errors[name] = unit * math.sqrt(share * (1.0 - share) / number)
        self.values.update(compare_rates(rates, earlier))
        return {
            **earlier,
            **{name: [*earlier.get(name, []), rate][-EARLIER:] for name, rate in rates.items()},
        }

    # ── curvature ─────────────────────────────────────────────────────────────────────────────

    def measure_curvature(self) -> None:
        """Estimate the trace of the Hessian of the probe batch's loss."""
        name, torch, batch = "curvature_trace_est", self._torch, self._batch
        if "checkpoint_probe_loss" not in self.values:
            self.unmeasured[name] = "what loss the model has is not known"
        elif COST * DIRECTIONS * self._forward_s > self._until_s - time.monotonic():
            self.unmeasured[name] = "there is no time"
        else:
            weights = [p for p in self._model.parameters() if p.requires_grad]

            def loss() -> Any:
                self._seen.pairs.clear()
                return self._loss(self._model(*batch.args, **batch.kwargs))

            value = trace_of_hessian(torch, loss, weights, DIRECTIONS)
            if math.isfinite(value):
                self.values[name] = value


def same_tensors(torch: Any, several: list[Any], others: list[Any]) -> bool:
    """Return whether these are the same, one by one."""
    return len(several) == len(others) and all(map(torch.equal, several, others))


def hash_document(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(path: str) -> str:
    """Return the SHA-256 of a file. Raises OSError."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            sha.update(piece)
    return sha.hexdigest()


def distances_from_median(values: list[float]) -> list[float]:
    """Return how far each is from their median, in medians of these distances."""
    middle = median(values)
    scale = median([abs(value - middle) for value in values])
    return [(value - middle) / max(scale, 1e-12) for value in values]


def explain(error: BaseException) -> str:
    """Return one sentence."""
    if isinstance(error, UnknownError):
        return str(error)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = (str(error).strip().splitlines() or [""])[0][:300]
    full = isinstance(error, MemoryError) or "allocate memory" in text
    return f"{'out of memory' if full else type(error).__name__}: {text}"


def open_tokens(path: str, classes: int) -> tuple[str, Callable[[int, int], list[int]], int]:
    """Open a file of uint16 or uint32.

    Returns:
        Its type as of `array`, what reads (start, count) tokens, and how many it has.

    Raises:
        UnknownError: it is of another form, or has other tokens than the model.
    """
    kind = "H" if classes <= 1 << 16 else "I"
    size = array.array(kind).itemsize
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    about = os.fstat(fd)
    if not (path.endswith(".bin") and stat.S_ISREG(about.st_mode)) or about.st_size % size:
        raise UnknownError(f"{path} is no file of token ids (.bin, uint16 or uint32)")

    def read(start: int, count: int) -> list[int]:
        values = array.array(kind, os.pread(fd, count * size, start * size)).tolist()
        if max(values) >= classes:
            raise UnknownError(f"{path} has the token {max(values)}, and the model {classes}")
        return values

    first = array.array(kind, os.pread(fd, FIRST * size, 0))
    if kind == "H" and any(first[::2]) and len(first) > 2 and not any(first[1::2]):
        raise UnknownError(
            f"{path} looks like uint32: of a model of {classes:,} tokens it is read as uint16, as "
            "of every model of up to 65,536"
        )
    return kind, read, about.st_size // size


def prove_any(evaluation: Evaluation, fills: Iterator[None], request: Mapping[str, Any]) -> float:
    """Prove the model with the first weights that can be; raise the first ProofError otherwise."""
    failure: Optional[ProofError] = None
    for _ in fills:
        now: Optional[ProofError] = None
        try:
            return evaluation.prove(float(request["value"]))
        except ProofError as error:
            now = error
        failure = failure or now
    assert failure is not None, "`fill_weights` yields or raises"
    raise failure


def measure_all(
    evaluation: Evaluation, before: Mapping[str, Any], harness: Optional[Harness], index: str
) -> dict[str, Any]:
    """Measure a proved model; return what the next evaluation is compared with."""
    kept: dict[str, Any] = {"logs": None, "inputs": evaluation.inputs}
    try:
        kept["logs"] = evaluation.measure_batch(before)
    except Exception as error:  # of the job's code; what is proved stays
        kept = {key: before.get(key) for key in kept}
        lacking = {"checkpoint_probe_loss", "checkpoint_entropy"} - evaluation.values.keys()
        evaluation.unmeasured.update(dict.fromkeys(lacking, explain(error)))
    kept |= {"artefact": evaluation.artefact, **evaluation.measure_slices(before)}
    keep_slices(kept, before)
    try:
        evaluation.measure_curvature()
    except Exception as error:
        evaluation.unmeasured["curvature_trace_est"] = explain(error)
    evaluation.measure_contexts()
    kept["rates"] = evaluation.measure_rates(harness, before)
    evaluation.measure_memory(index)
    return kept


def evaluate(torch: Any, request: Mapping[str, Any], until_s: float) -> dict[str, Any]:
    """Return the answer.

    Returns:
        `reason`: why nothing is known, "" where it is. `was`, `now`: of the probe batch in the job
        and here. `values`: metrics by id. `errors`: one standard error of some. `unmeasured`: why
        one is absent. `parts`: see `rebuild.restore_parts`. `artefact`: hash of the evaluation, ""
        where it is not known.
    """
    seen = SeenLosses(torch)
    objects = verify.read_objects(torch, request["checkpoint"])
    structure = rebuild.read_structure(
        torch, request["structure"], request["digest"], reimport=bool(request.get("reimport"))
    )
    batch = read_batch(torch, request["batch"])
    evaluation = Evaluation(torch, structure.model, batch, seen, until_s)
    now = prove_any(evaluation, rebuild.fill_weights(torch, structure.model, objects), request)
    before: Mapping[str, Any] = {}
    if request.get("previous"):
        with suppress(OSError, verify.NeedsCode, verify.Damaged):
            before = verify.load_object(torch, request["previous"], zipped=True)
    harness = evaluation.start_harness(request)
    artefact = evaluation.open_slices(
        request.get("val", {}),
        int(request.get("tokens", 0)),
        request.get("tokenizer", ""),
        request.get("index", ""),
        None if harness is None else harness.conditions,
    )
    kept = measure_all(evaluation, before, harness, request.get("index", ""))
    parts = rebuild.restore_parts(torch, structure, objects)
    failed = {part for part, verdict in parts.items() if verdict.startswith(FAILED)}
    unknown = {part for part, verdict in parts.items() if verdict.startswith(UNKNOWN)}
    good = {part for part, verdict in parts.items() if verdict == RESTORED}
    alike = before.get("series") == request.get("series")
    had = set(before.get("parts", ())) if alike else good
    evaluation.values["checkpoint_parts_lost"] = float(len(failed | (had - good - unknown)))
    if request.get("keep"):
        kept |= {"series": request.get("series"), "parts": sorted(had & (good | unknown))}
        torch.save(kept, request["keep"] + ".part")
        os.replace(request["keep"] + ".part", request["keep"])
    return {
        "was": float(request["value"]),
        "now": now,
        "values": {n: v for n, v in evaluation.values.items() if math.isfinite(v)},
        "errors": evaluation.errors,
        "unmeasured": evaluation.unmeasured,
        "parts": parts,
        "artefact": artefact,
    }


def main() -> None:
    """Answer the request; what the job's code prints is not the answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the job
    request, began = json.load(sys.stdin), time.monotonic()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    renice_self(int(request.get("nice", 19)), int(request["memory"]))
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # of what modules compile that are imported
    answer: dict[str, Any] = {"reason": ""}
    try:
        torch = find_torch()
        torch.set_num_threads(1)
        answer.update(evaluate(torch, request, began + float(request["seconds"])))
    except UnknownError as error:
        answer.update({"reason": str(error), **getattr(error, "both", {})})
    except verify.NeedsCode as error:
        answer["reason"] = f"it cannot be read without running code from it: {error}"
    except ImportError as error:
        answer["reason"] = f"a module cannot be imported: {error}"
    except (Exception, SystemExit) as error:
        answer["reason"] = explain(error)
    print(json.dumps(answer), file=out, flush=True)
    os._exit(0)  # whatever the job's modules have started


if __name__ == "__main__":
    main()
