"""Faults of the data: bad, cut, repeated, reordered or mislabelled batches, and evaluations."""

from __future__ import annotations

from typing import Any, Callable, ClassVar, Mapping, Optional

from ..torch_state.structure import nested_leaves
from . import Args, Call, CannotActError, Fault, Kwargs, Params, Value


def is_tokens(torch: Any, value: Any) -> bool:
    """Whether this may be token ids or class indices, shape (batch, ...)."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in (torch.int64, torch.int32)
        and value.dim() > 0
    )


def token_positions(torch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return positions and names of all tokens; a model's own input comes first."""
    positions: list[Any] = [i for i, value in enumerate(args) if is_tokens(torch, value)]
    return positions + [name for name, value in kwargs.items() if is_tokens(torch, value)]


def change_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    positions: list[Any],
    change_value: Callable[[Any], Any],
) -> Call:
    """Return the arguments with those at `positions` changed; the job's own stay as they are."""
    changed = tuple(
        change_value(value) if i in positions else value for i, value in enumerate(args)
    )
    return changed, {k: change_value(v) if k in positions else v for k, v in kwargs.items()}


class BadBatch(Fault):
    """Replaces the first whole-number tensor that goes into the outermost module."""

    MEANING = "feed random tokens into the model for some steps"
    MOVES = "train_loss_raw"
    PARAMS: ClassVar[Params] = {
        "steps": (10, "for so many steps"),
        "seed": (0, "of the fault's own generator"),
    }

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        positions = token_positions(self.torch, args, kwargs)[:1]
        if not positions:
            raise CannotActError("no whole numbers, such as tokens, among the inputs of the model")
        return change_arguments(args, kwargs, positions, lambda tokens: self._noise(root, tokens))

    def _noise(self, root: Any, like: Any) -> Any:
        sizes = [m.num_embeddings for m in root.modules() if hasattr(m, "num_embeddings")]
        size = max(sizes, default=0) or int(like.max()) + 1
        noise = self.torch.randint(
            size, tuple(like.shape), generator=self.generator, dtype=like.dtype, device="cpu"
        )
        return noise.to(like.device)


class BatchCut(Fault):
    """Keeps the first rows only, of every input that has as many rows as the tokens."""

    MEANING = "keep a part of each batch only"
    MOVES = "tokens_per_update"
    PARAMS: ClassVar[Params] = {
        "factor": (0.125, "which part of its rows, one at least"),
        "steps": (100000, "for so many steps"),
    }

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        positions = token_positions(self.torch, args, kwargs)
        if not positions:
            raise CannotActError("no whole numbers, such as tokens, among the inputs of the model")
        if len(positions) < 2:  # cut inputs and whole targets would kill the job
            raise CannotActError("no targets of whole numbers among the inputs of the model")
        tokens = args[positions[0]] if isinstance(positions[0], int) else kwargs[positions[0]]
        rows = tokens.shape[0]
        rows_left = max(1, int(rows * float(self.params["factor"])))

        def cut(value: Any) -> Any:
            is_batch = isinstance(value, self.torch.Tensor) and value.dim() > 0
            return value[:rows_left] if is_batch and value.shape[0] == rows else value

        return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}


class DataOrder(Fault):
    """Feeds all calls of the outermost module in some steps once more, in the same order."""

    MEANING = "feed each few batches several times over before the next few"
    MOVES = "train_loss_raw"
    PARAMS: ClassVar[Params] = {
        "block": (4, "steps whose batches make a block"),
        "passes": (8, "times that each block is fed"),
        "steps": (0, "for so many steps; 0: for the rest of the run"),
    }

    def __init__(self, torch: Any, params: Mapping[str, Value]) -> None:
        super().__init__(torch, params)
        self._block = max(1, int(params["block"]))
        self._length = self._block * max(1, int(params["passes"]))
        self._kept: list[list[tuple[int, Args, Kwargs]]] = []  # calls by step; the root's id first
        self._step = self._calls = 0
        self._ended = self._has_loss = False

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        if self._ended:
            self._ended, self._step, self._calls = False, self._step + 1, 0
        number, call = self._step % self._length, self._calls
        self._calls += 1
        if number >= self._block:
            previous = self._kept[number % self._block]
            if call < len(previous) and previous[call][0] == id(root):
                return self._copied(previous[call][1]), self._copied(previous[call][2])
            return args, kwargs
        if any(
            isinstance(v, self.torch.Tensor) and v.requires_grad
            for v in nested_leaves((args, kwargs))
        ):
            raise CannotActError("an input of the model is itself computed by what is trained")
        if not call:
            self._kept = [*(self._kept if number else []), []]
        self._kept[-1].append((id(root), self._copied(args), self._copied(kwargs)))
        return args, kwargs

    def output(self, result: Any) -> None:
        if self._has_loss:
            return
        tensors = (v for v in nested_leaves(result) if isinstance(v, self.torch.Tensor))
        self._has_loss = any(v.requires_grad and v.numel() == 1 for v in tensors)
        if not self._has_loss:
            raise CannotActError("the model returns no loss, so its targets come from elsewhere")

    def before_step(self, optimizers: list[Any]) -> None:
        self._ended = True

    def end(self) -> None:
        self._kept = []

    def _copied(self, value: Any) -> Any:
        """Return a copy of the tensors in tuples, lists and dicts: a job may write into its own."""
        if isinstance(value, self.torch.Tensor):
            return value.detach().clone()
        if type(value) in (tuple, list):
            return type(value)(map(self._copied, value))
        if type(value) is dict:
            return {name: self._copied(item) for name, item in value.items()}
        return value


class EvalMismatch(Fault):
    """Permutes ids in the tokens of evaluations."""

    MEANING = "permute token ids in evaluations, not in the training"
    MOVES = "val_loss"
    PARAMS: ClassVar[Params] = {
        "tokens": (100, "so many ids, those that occur most"),
        "steps": (0, "for so many steps; 0: for the rest of the run"),
        "seed": (0, "of the fault's own generator"),
    }

    _seen = False  # any evaluation was
    _ids: Optional[tuple[Any, Any]] = None  # ascending, and what each becomes

    def evaluation(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        self._seen = True
        positions = token_positions(self.torch, args, kwargs)
        values = (*args, *kwargs.values())
        leading = next((v for v in values if isinstance(v, self.torch.Tensor)), None)
        if not positions or leading is not _argument(positions[0], args, kwargs):
            raise CannotActError("the first input of the model holds no whole numbers, as tokens")
        if self._ids is None:
            self._ids = self._choose(leading)
        alike = [
            position
            for position in positions
            if self._is_same(leading, _argument(position, args, kwargs))
        ]
        return change_arguments(args, kwargs, alike, self._permuted)

    def _choose(self, tokens: Any) -> tuple[Any, Any]:
        ids, counts = tokens[tokens >= 0].unique(return_counts=True)
        commonest = counts.argsort(descending=True, stable=True)[: int(self.params["tokens"])]
        if len(commonest) < 2:
            raise CannotActError("there are no two tokens that could change places")
        order = self.torch.randperm(len(commonest), generator=self.generator).to(ids.device)
        cycle = ids[commonest][order]
        ascending = cycle.argsort()
        return cycle[ascending], cycle.roll(1)[ascending]  # one cycle: no id stays

    def _is_same(self, leading: Any, tensor: Any) -> bool:
        """Whether `other` holds the tokens of `first`, or those that follow them."""
        if tensor is leading:
            return True
        if tensor.shape != leading.shape:
            return False
        for ours, theirs in ((leading, tensor), (leading[..., 1:], tensor[..., :-1])):
            counted = theirs >= 0  # -100 and the like: no target
            if 2 * int(((ours == theirs) & counted).sum()) > int(counted.sum()):
                return True
        return False

    def _permuted(self, tokens: Any) -> Any:
        assert self._ids is not None
        ids, partners = (table.to(tokens) for table in self._ids)
        index = self.torch.searchsorted(ids, tokens.contiguous()).clamp(max=len(ids) - 1)
        return self.torch.where(ids[index] == tokens, partners[index], tokens)

    def end(self) -> None:
        if not self._seen:
            raise CannotActError("the trained model was not evaluated while it was on")


def _argument(position: Any, args: Args, kwargs: Kwargs) -> Any:
    return args[position] if isinstance(position, int) else kwargs[position]


class RepeatedTokens(Fault):
    """Makes every whole-number input of the outermost module constant."""

    MEANING = "feed one token over and over, inputs and targets"
    MOVES = "train_loss_raw"
    PARAMS: ClassVar[Params] = {"steps": (10, "for so many steps"), "token": (0, "which token")}

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        positions = token_positions(self.torch, args, kwargs)
        if not positions:
            raise CannotActError("no whole numbers, such as tokens, among the inputs of the model")
        token = int(self.params["token"])
        return change_arguments(args, kwargs, positions, lambda t: self.torch.full_like(t, token))


class SameBatch(Fault):
    """All ranks get rank 0's tokens."""

    MEANING = "feed rank 0's batch to all ranks"
    PARAMS: ClassVar[Params] = {"steps": (100000, "for so many steps")}

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        group = self.torch.distributed
        several = group.is_available() and group.is_initialized() and group.get_world_size() > 1
        if not several:
            raise CannotActError("the job has one rank")
        positions = token_positions(self.torch, args, kwargs)
        if not positions:
            raise CannotActError("no whole numbers, such as tokens, among the inputs of the model")

        def shared(tokens: Any) -> Any:
            copy = tokens.clone()
            group.broadcast(copy, 0)
            return copy

        return change_arguments(args, kwargs, positions, shared)


class ShuffledLabels(Fault):
    """Shuffles the last whole-number input of the outermost module along its last dimension."""

    MEANING = "shuffle the targets within each sequence for some steps"
    MOVES = "train_loss_raw"
    PARAMS: ClassVar[Params] = {
        "steps": (10, "for so many steps"),
        "seed": (0, "of the fault's own generator"),
    }

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        positions = token_positions(self.torch, args, kwargs)
        if len(positions) < 2:
            raise CannotActError("no targets of whole numbers among the inputs of the model")
        return change_arguments(args, kwargs, positions[-1:], self._shuffle)

    def _shuffle(self, labels: Any) -> Any:
        order = self.torch.randperm(labels.shape[-1], generator=self.generator)
        return labels[..., order.to(labels.device)]
