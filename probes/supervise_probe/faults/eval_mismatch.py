"""Evaluations under another tokenizer than the training, as behind a vocabulary that was mixed up.

Ids that occur in the first evaluated batch change places, the most frequent ones, so that none is
outside of the model's table. Those of inputs do, and of targets that are given to the model beside
them and hold the same tokens, at the same places or one earlier; targets of a loss outside of the
model stay as they are. The training is not touched, and nothing is written anywhere: the values
of the evaluation are all that shows it.

What a call is for, only its surroundings say (`stepping/evaluation_pass.py`): the trained model, in
eval mode, without gradients, between two steps. A job that writes its training data with its model
there, as with policy gradients, gets other data, too. Another prompt or harness is no such fault.
"""

from __future__ import annotations

from typing import Any, ClassVar, Mapping, Optional, Tuple

from . import Args, Call, CannotActError, Fault, Kwargs, Params, Value
from ._tokens import change, places


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
    _ids: Optional[Tuple[Any, Any]] = None  # ascending, and what each becomes

    def __init__(self, torch: Any, params: Mapping[str, Value]) -> None:
        super().__init__(torch, params)
        self._generator = torch.Generator().manual_seed(int(params["seed"]))

    def evaluation(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        self._seen = True
        where = places(self.torch, args, kwargs)
        values = (*args, *kwargs.values())
        first = next((v for v in values if isinstance(v, self.torch.Tensor)), None)
        if not where or first is not _at(where[0], args, kwargs):
            raise CannotActError("the first input of the model holds no whole numbers, as tokens")
        if self._ids is None:
            self._ids = self._choose(first)
        alike = [each for each in where if self._is_same(first, _at(each, args, kwargs))]
        return change(args, kwargs, alike, self._permuted)

    def _choose(self, tokens: Any) -> Tuple[Any, Any]:
        ids, counts = tokens[tokens >= 0].unique(return_counts=True)
        most = counts.argsort(descending=True, stable=True)[: int(self.params["tokens"])]
        if len(most) < 2:
            raise CannotActError("there are no two tokens that could change places")
        order = self.torch.randperm(len(most), generator=self._generator).to(ids.device)
        cycle = ids[most][order]
        ascending = cycle.argsort()
        return cycle[ascending], cycle.roll(1)[ascending]  # one cycle: no id stays

    def _is_same(self, first: Any, other: Any) -> bool:
        """Whether `other` holds the tokens of `first`, or those that follow them."""
        if other is first:
            return True
        if other.shape != first.shape:
            return False
        for ours, theirs in ((first, other), (first[..., 1:], other[..., :-1])):
            counted = theirs >= 0  # -100 and the like: no target
            if 2 * int(((ours == theirs) & counted).sum()) > int(counted.sum()):
                return True
        return False

    def _permuted(self, tokens: Any) -> Any:
        assert self._ids is not None
        ids, others = (each.to(tokens) for each in self._ids)
        at = self.torch.searchsorted(ids, tokens.contiguous()).clamp(max=len(ids) - 1)
        return self.torch.where(ids[at] == tokens, others[at], tokens)

    def end(self) -> None:
        if not self._seen:
            raise CannotActError("the trained model was not evaluated while it was on")


def _at(place: Any, args: Args, kwargs: Kwargs) -> Any:
    return args[place] if isinstance(place, int) else kwargs[place]
