"""What is in a checkpoint's objects: tensors that must be finite, an optimizer, a step.

Nothing is copied: tensors may be mapped from a file larger than memory, and are read in pieces.
"""

from typing import Any, Dict, List, Optional, Set, Tuple

PIECE = 1 << 22  # elements that are looked at at once
DEPTH = 12
STEPS = ("iter_num", "global_step", "step", "iteration", "steps", "num_steps")
OPTIMIZER = {"state", "param_groups"}
NAMED = ("optim.", "optimizer.")  # how flattened optimizer states begin
CALLBACKS = "callbacks."  # of Lightning; best scores so far are in there, which begin at infinity


class Contents:
    """Gathers what the objects of one checkpoint hold.

    Attributes:
        tensors, bytes: how many, and how large together.
        step: under the first obvious integer key, None if there is none.
        optimizer, rng: whether such a state was seen.
        problems: what is wrong, one sentence each.
    """

    def __init__(self, torch: Any, finite: bool) -> None:
        self._torch = torch
        self._finite = finite
        self._seen: Set[Tuple[Any, ...]] = set()
        self.tensors = 0
        self.bytes = 0
        self.step: Optional[int] = None
        self.optimizer = False
        self.rng = False
        self.problems: List[str] = []

    def take(self, thing: Any, name: str) -> None:
        """Look at an object and all that is in it. Tied tensors in it are looked at once."""
        self._seen.clear()  # another object may lie where the last one lay
        todo: List[Tuple[str, Any, int]] = [(name, thing, 0)]
        while todo:
            name, thing, depth = todo.pop()
            if isinstance(thing, self._torch.Tensor):
                self._tensor(thing, name)
            elif depth < DEPTH and isinstance(thing, dict):
                self._dictionary(thing, depth)
                todo += [
                    (f"{name}.{k}" if name else str(k), v, depth + 1) for k, v in thing.items()
                ]
            elif depth < DEPTH and isinstance(thing, (list, tuple)):
                todo += [(f"{name}.{i}", value, depth + 1) for i, value in enumerate(thing)]

    def _dictionary(self, thing: Dict[Any, Any], depth: int) -> None:
        if thing.keys() >= OPTIMIZER and thing["param_groups"]:
            self.optimizer = True
        for key in thing:
            self.named(str(key))
        if depth < 2 and self.step is None:
            found = (thing.get(key) for key in STEPS)
            self.step = next((n for n in found if type(n) is int), None)

    def named(self, name: str) -> None:
        """A part of the checkpoint has this name."""
        if "rng" in name.lower() or "random_state" in name.lower():
            self.rng = True
        if name.startswith(NAMED):
            self.optimizer = True

    def _tensor(self, tensor: Any, name: str) -> None:
        """Count a tensor, and look whether it is finite."""
        if tensor.layout == self._torch.strided and tensor.device.type != "meta":
            key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            if tensor.numel() and key in self._seen:
                return
            self._seen.add(key)
        self.tensors += 1
        self.bytes += tensor.numel() * tensor.element_size()
        score = tensor.numel() == 1 and name.startswith(CALLBACKS)
        if self._finite and not score:
            wrong = self._not_finite(tensor, "mask" in name.lower())
            if wrong:
                self.problems.append(f"{name} has {wrong}")

    def _not_finite(self, tensor: Any, masks: bool) -> str:
        """Return what a tensor holds that is no number, else "".

        Args:
            masks: minus infinity is allowed.
        """
        torch = self._torch
        if tensor.device.type == "meta" or not (tensor.is_floating_point() or tensor.is_complex()):
            return ""
        if tensor.layout == torch.sparse_coo:
            tensor = tensor._values()
        elif tensor.layout != torch.strided:
            tensor = tensor.values()
        for piece in tensor.detach().reshape(-1).split(PIECE):
            if piece.element_size() == 1:  # eight bits: torch has few operations on them
                piece = piece.float()
            if bool(torch.isfinite(piece).all()):
                continue
            if bool(torch.isnan(piece).any()):
                return "NaN"
            if not masks or bool(torch.isposinf(piece).any()):
                return "infinite values"
        return ""
