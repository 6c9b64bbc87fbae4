"""Checks of the weights at a savepoint: output of the probe batch, and a weight that moved alone.

The output is the model's loss on the probe batch, also where the job takes that of logits, and how
sure its outputs are and how far they have moved. Where the job takes the loss, the targets are
needed: those of the first loss in the step whose input was kept, of logits that have the rows of
the batch in front. A loss that is taken in chunks, as litgpt does it, is that of the first one.
Logits are those of a loss that the model takes itself, else of one that the job took. A target as
large as the output does for `check_weights`. Where no loss can be told, none is.

A weight that has moved alone since the savepoint before shows a flipped bit. All weights of a
tensor move with the same optimizer: in 96 healthy runs (MLPs, CNNs, embeddings, LoRA, wide models;
SGD and Adam; float32 and bfloat16; savepoints every 5 and 25 steps) the largest change was at most
1.5 times what counts as the second largest of its tensor. Behind a flipped bit that cost anything
it was 11 times and more. It takes a difference and two norms per tensor at a savepoint, half of
what the savepoint of an Adam takes, and looks more closely only where the largest change is far
from what is usual in its tensor. Weights on an accelerator are not compared: their copies would
have to go back there. The file of a probe batch is complete or absent, with its hash beside it.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import contextmanager
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Optional

from ..runtime import files
from ..runtime.guard import is_from_signal_handler
from ..sampling.activations import LOGITS, ROWS, sample_rows
from ..sampling.side_forward import SEQUENCES, floating_tensors

LIKELIEST = 10  # tokens; of fewer than 100 classes a tenth
CHUNK = 1024  # targets of a chunk that are kept


class Targets(NamedTuple):
    """Those of the rows that were kept.

    Attributes:
        rows: of the first rows of the batch, one by one or (rows, positions), int64.
        classes: how many there are. ignored: is none of them.
        batch: rows that the batch had. taken: targets that the loss was taken of, along the first
            dimension.
    """

    rows: Any
    classes: int
    ignored: int
    batch: int
    sampled: int


class ReferenceOutput:
    """The outputs of the newest runs.

    Attributes:
        targets: of the job's loss, None where it takes none of classes. is_paired: the newest loss
            is of a target as large as the output.
    """

    def __init__(self, torch: Any, sequences: int = SEQUENCES) -> None:
        """`sequences`: rows of a batch that its runs have, at most."""
        self._torch, self._sequences = torch, sequences
        take = torch.nn.functional.cross_entropy
        self._take = getattr(take, "__original_fn", take)  # no loss of the job's
        self.targets: Optional[Targets] = None
        self._pair: Optional[tuple[Any, Callable[..., Any]]] = None  # a target, and the loss of it
        self.is_paired = False
        self._logits: Any = None  # some rows, of the run under way or the newest one
        self._before: Any = None  # the log-probabilities of these rows at the savepoint before

    def keep_targets(self, batch: int, logits: Any, targets: Any, ignored: int) -> None:
        """A loss was taken of these; `batch`: the rows of the input."""
        count = targets.shape[0] if targets.dim() else 0
        if targets.dtype != self._torch.int64 or logits.dim() < 2 or not batch or not count:
            return
        limit = count // batch * self._sequences
        if targets.dim() == 1:
            limit = max(limit, CHUNK)  # it may be a chunk
        rows = targets.detach()[:limit].clone()
        self.targets = Targets(rows, int(logits.shape[1]), ignored, batch, count)

    def keep_pair(self, batch: int, output: Any, target: Any, take: Callable[..., Any]) -> None:
        """A loss was taken of these, by that function; `batch`: the rows of the input."""
        is_real = not (target.is_complex() or output.is_complex())  # as the outputs of a run are
        if is_real and target.shape == output.shape and target.dim() and len(target) == batch:
            self._pair = target.detach()[: self._sequences].clone(), take

    def add_logits(self, logits: Any) -> None:
        """The model takes a loss of these, in the run under way."""
        if self._logits is None and logits.dim() > 1:
            wide = logits.transpose(1, -1) if logits.dim() > 2 else logits
            self._logits = sample_rows(wide, max(16, min(ROWS, LOGITS // wide.shape[-1]))).float()

    def begin_run(self) -> None:
        """A run begins."""
        self._logits = None

    def loss(self, output: Any) -> Optional[Any]:
        """Return the loss that a model's output holds or has, None where it cannot be told."""
        several, targets = floating_tensors(self._torch, output), self.targets
        loss = next((v for v in several if v.numel() == 1), None)
        self.is_paired = False
        if loss is not None or not several:
            return None if loss is None else loss.double().reshape(())
        if targets is None:
            return self._loss_of_pair(several[0])
        logits, rows = several[0].float(), targets.rows.to(several[0].device)
        if logits.shape[-1] == targets.classes and rows.dim() == 1:
            logits = logits.reshape(-1, targets.classes)
        logits, rows = _matched(targets, self._sequences, logits, rows)
        shape = (logits.shape[0], *logits.shape[2:])
        if logits.dim() < 2 or logits.shape[1] != targets.classes or shape != rows.shape:
            return None
        self.add_logits(logits)
        return self._take(logits, rows, ignore_index=targets.ignored).double()

    def _loss_of_pair(self, output: Any) -> Optional[Any]:
        if self._pair is None:
            return None
        target, take = self._pair
        if output.numel() == target.numel() and output.shape[0] == target.shape[0]:
            output = output.reshape(target.shape)  # the job may have dropped a dimension of one
        if output.shape != target.shape or output.device != target.device:
            return None
        try:
            loss = take(output.float(), target.float()).double()
        except Exception as error:  # the batch has other uses, which go on without it
            if is_from_signal_handler(error):
                raise
            self._pair = None
            return None
        self.is_paired = True
        return loss

    def describe(self) -> dict[str, Any]:
        """Return metrics of the newest run's logits, as tensors of one element."""
        logits, self._logits = self._logits, None
        if logits is None:
            return {}
        logs = logits.log_softmax(-1)
        shares, previous, self._before = logs.exp(), self._before, logs
        width = int(logs.shape[-1])
        likeliest = shares.topk(max(1, min(LIKELIEST, width // LIKELIEST)), -1).values
        values = {
            "logit_entropy_probe": -(shares * logs.clamp(min=-1e4)).sum(-1).mean(),
            "topk_mass_probe": 100.0 * likeliest.sum(-1).mean(),
        }
        if previous is not None and previous.shape == logs.shape:
            moved = previous.exp() * (previous - logs).clamp(min=-1e4, max=1e4)
            values["output_kl_to_prev"] = moved.sum(-1).mean()
        return values

    def forget(self) -> None:
        """The weights are others than those that the next run follows upon."""
        self._before = None


def _matched(targets: Targets, sequences: int, logits: Any, rows: Any) -> tuple[Any, Any]:
    """Return the logits whose targets are known, and these.

    A loss was taken in chunks if it had half as many targets as the batch has logits, or fewer; a
    shift by one position does not come to that.
    """
    rows_compared, count = min(sequences, targets.batch), int(logits.shape[0])
    if count * targets.batch >= 2 * targets.sampled * rows_compared:
        rows_known = min(count, int(rows.shape[0]))
        return logits[:rows_known], rows[:rows_known]
    return logits, rows[: targets.sampled // targets.batch * sequences]


LEAST_ELEMENTS = 64  # elements; a smaller tensor is not compared
PIECE = 1 << 18  # elements that are compared at once, in memory that a CPU's cache holds
# In root mean squares of its tensor's changes, of which a dense tensor's largest is 8.7 at most.
# Only beyond it is looked at more closely: rare rows of an embedding are beyond, and have company.
FAR_RMS = 12.0
SCALE = 16.0  # a change below the largest weight over this may be rounding, and is none
# Times the second largest change, for the loss to be compared; four times the healthy ones.
LONE_LIMIT = 6.0


class LoneWeight(NamedTuple):
    """The weight that moved most alone.

    Attributes:
        times: the second largest change around it. place: the weight, as a tensor of one element
            in the job's memory. old: the same at the savepoint before.
    """

    times: float
    place: Any
    old: Any


def find_lone_weight(torch: Any, several: Iterable[tuple[Any, Any]]) -> Optional[LoneWeight]:
    """Compare weights with their copies; None where none moved far from all others."""
    best: Optional[LoneWeight] = None
    group: list[tuple[Any, Any]] = []
    room = PIECE
    for new, old in _pieces(several):
        if group and new.numel() > room:
            best = _better(best, _largest_lone(torch, group))
            group, room = [], PIECE
        group.append((new, old))
        room -= new.numel()
    return _better(best, _largest_lone(torch, group)) if group else best


def _pieces(several: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield the elements of each weight and of its copy in the order of memory, in pieces."""
    for weight, old in several:
        new, count = weight.detach(), weight.numel()
        same = new.shape == old.shape and new.stride() == old.stride()  # a copy has no gaps
        if not (weight.requires_grad and new.is_cpu and new.is_floating_point() and same):
            continue
        for start in range(0, count, PIECE) if count >= LEAST_ELEMENTS else ():
            first, size = new.storage_offset() + start, min(PIECE, count - start)
            yield (
                new.as_strided((size,), (1,), first),
                old.as_strided((size,), (1,), old.storage_offset() + start),
            )


def _largest_lone(torch: Any, group: list[tuple[Any, Any]]) -> Optional[LoneWeight]:
    """Return the one of these that moved most alone, if its change is far from the others."""
    changes = torch._foreach_sub(*map(list, zip(*group)))
    torch._foreach_abs_(changes)
    # A norm of infinite order takes twenty times as long.
    norms = [change.amax() for change in changes], torch._foreach_norm(changes)
    largest, totals = (torch.stack(norm).double().tolist() for norm in norms)
    best: Optional[LoneWeight] = None
    for change, (new, old), most, total in zip(changes, group, largest, totals):
        others = max(0.0, total * total - most * most) / max(1, change.numel() - 1)
        if 0.0 < most < float("inf") and most * most > FAR_RMS * FAR_RMS * others:
            (_, second), (place, _) = (v.tolist() for v in change.float().topk(2))
            second = max(second, float(new.abs().max()) / SCALE)
            lone = LoneWeight(most / second, new[place : place + 1], old[place : place + 1].clone())
            best = _better(best, lone)
    return best


def _better(one: Optional[LoneWeight], other: Optional[LoneWeight]) -> Optional[LoneWeight]:
    return max((lone for lone in (one, other) if lone), key=lambda lone: lone.times, default=None)


@contextmanager
def with_old_weight(lone: LoneWeight) -> Iterator[None]:
    """Give the weight its old value for a while; its bits come back whatever happens.

    Torch counts no write to the weight: `place` is a view of a detached one.
    """
    data = lone.place.data
    now = data.clone()
    data.copy_(lone.old)
    try:
        yield
    finally:
        data.copy_(now)


HASH = ".sha256"
HASH_PIECE = 1 << 20  # bytes that are hashed at a time


class _HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.hash = hashlib.sha256()

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        self.hash.update(view)
        self._file.write(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()


def write_rows(save: Callable[..., Any], document: dict[str, Any], path: str) -> None:
    """Write a file that is complete or absent, and its hash beside it.

    Raises:
        OSError, RuntimeError: it cannot be written; the previous file is still there.
    """
    files.make_directory(os.path.dirname(path))
    with files.replacing_file(path, sync=True) as file:
        out = _HashedFile(file)
        save(document, out)
        with files.replacing_file(path + HASH, sync=True) as beside:
            beside.write(f"{out.hash.hexdigest()}  {os.path.basename(path)}\n".encode())


def read_rows(load: Callable[..., Any], path: str) -> dict[str, Any]:
    """Return the document in a file.

    Raises:
        OSError, ValueError: it cannot be read, or differs from what was written.
    """
    if os.path.exists(path + HASH):
        expected = files.read_file(path + HASH).decode("ascii").split()
        if not expected or expected[0] != _hash(path):
            raise ValueError("its hash differs from the one beside it")
    os.close(files.open_file(path))  # refuses a FIFO, at which torch would wait
    document = load(path, map_location="cpu", weights_only=True)
    if not isinstance(document, dict) or "what" not in document:
        raise ValueError("it is not a probe batch")
    return document


def _hash(path: str) -> str:
    digest = hashlib.sha256()
    with os.fdopen(files.open_file(path), "rb") as file:
        while True:
            piece = file.read(HASH_PIECE)
            if not piece:
                return digest.hexdigest()
            digest.update(piece)
