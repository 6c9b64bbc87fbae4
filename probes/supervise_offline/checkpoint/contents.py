"""The contents of a checkpoint: tensors that must be finite, an optimizer, a step.

Nothing is copied: tensors may be mapped from a file larger than memory, and are read in pieces.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
from typing import Any, BinaryIO, Dict, List, Optional, Set, Tuple

IDLE_S = 120.0  # longer than an NFS server takes to come back; project default
SLOWEST = 20_000_000  # bytes per second of the slowest disk, as the supervisor assumes
SHARE, MARGIN = 4, 1 << 30  # times the bytes of the files, and bytes beyond that; project defaults
_armed = False


def start_stall_alarm() -> None:
    """From now on end this process by SIGALRM once `progress` was not called for `IDLE_S`."""
    global _armed
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    _armed = True
    report_progress()


def report_progress(next_bytes: int = 0) -> None:
    """Say that something was read, and how many bytes the next part has."""
    if _armed:
        signal.setitimer(signal.ITIMER_REAL, IDLE_S + next_bytes / SLOWEST)


def limit_memory(size: int) -> None:
    """Let this process take some times the `size` of what it reads, besides what it has."""
    with open("/proc/self/status", encoding="ascii") as file:
        has = next(int(line.split()[1]) for line in file if line.startswith("VmData:")) << 10
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = has + SHARE * size + MARGIN
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def open_file(path: str) -> BinaryIO:
    """Open a regular file, without waiting. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return os.fdopen(fd, "rb")


PIECE = 1 << 22  # elements checked at once
DEPTH = 12
STEPS = ("iter_num", "global_step", "step", "iteration", "steps", "num_steps")
OPTIMIZER = {"state", "param_groups"}
NAMED = ("optim.", "optimizer.", "param_groups.")  # prefixes of flattened optimizer states
HINTS = ("optim", "opt_state", "param_groups", "exp_avg", "moment")  # in names of such a state
MODELS = {"model", "state_dict", "model_state_dict", "module", "net", "weights"}  # keys of a file
CALLBACKS = "callbacks."  # of Lightning; contains best scores, which start at infinity


class Contents:
    """Collects the contents of one checkpoint.

    Attributes:
        tensors, bytes: number and total size.
        step: value of the first key in `STEPS`, None if there is none.
        optimizer, rng: whether it has such a state.
        hints: whether any name looks like an optimizer's state.
        weights, other: whether it has tensors that are a model's by their place, and tensors that
            may be anything.
        problems: one sentence each.
    """

    def __init__(self, torch: Any, finite: bool) -> None:
        self._torch = torch
        self._finite = finite
        self._seen: Set[Tuple[Any, ...]] = set()
        self.tensors = 0
        self.bytes = 0
        self.step: Optional[int] = None
        self.optimizer = False
        self.rng = self.hints = self.weights = self.other = False
        self.problems: List[str] = []

    def take(self, thing: Any, name: str) -> None:
        """Check an object recursively; tied tensors once."""
        self._seen.clear()  # another object may reuse the address
        entered: Set[int] = set()  # a few lists that hold one another have no end of paths
        todo: List[Tuple[str, Any, int, str]] = [(name, thing, 0, _section(name, "weights"))]
        while todo:
            name, thing, depth, section = todo.pop()
            if isinstance(thing, self._torch.Tensor):
                self._tensor(thing, name)
                if section != "optimizer" and thing.is_floating_point() and thing.dim():
                    setattr(self, section, True)
                continue
            inner: List[Tuple[Any, Any]] = []
            if id(thing) in entered:
                continue
            if depth < DEPTH and isinstance(thing, dict):
                self._dictionary(thing, depth)
                section = "optimizer" if _is_optimizer(thing) else section
                inner = list(thing.items())
            elif depth < DEPTH and isinstance(thing, (list, tuple)):
                inner = list(enumerate(thing))
            if inner:
                entered.add(id(thing))
            for key, value in inner:
                holds = isinstance(value, (dict, list, tuple))
                lost = not depth and holds and key not in MODELS
                place = "other" if lost and section == "weights" else section
                path = f"{name}.{key}" if name or isinstance(thing, (list, tuple)) else str(key)
                todo.append((path, value, depth + 1, _section(str(key), place)))

    def _dictionary(self, thing: Dict[Any, Any], depth: int) -> None:
        if _is_optimizer(thing):
            self.optimizer = True
        for key in thing:
            self.named(str(key))
        if depth < 2 and self.step is None:
            steps = (thing.get(key) for key in STEPS)
            self.step = next((n for n in steps if type(n) is int), None)

    def named(self, name: str) -> None:
        """Record the name of a part of the checkpoint."""
        if "rng" in name.lower() or "random_state" in name.lower():
            self.rng = True
        if name.startswith(NAMED) or ".param_groups." in name:  # the latter of a flattened state
            self.optimizer = True
        self.hints = self.hints or _section(name, "") == "optimizer"

    def _tensor(self, tensor: Any, name: str) -> None:
        """Count a tensor, and check that it is finite."""
        if tensor.layout == self._torch.strided and tensor.device.type != "meta":
            key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            if tensor.numel() and key in self._seen:
                return
            self._seen.add(key)
            tensor = _stored(self._torch, tensor)
        self.tensors += 1
        self.bytes += tensor.numel() * tensor.element_size()
        score = tensor.numel() == 1 and name.startswith(CALLBACKS)
        if self._finite and not score:
            wrong = self._not_finite(tensor, "mask" in name.lower())
            if wrong:
                self.problems.append(f"{name} has {wrong}")

    def _not_finite(self, tensor: Any, masks: bool) -> str:
        """Return which nonfinite values a tensor has, "" if none.

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
        tensor = _stored(torch, tensor.detach())
        report_progress(tensor.numel() * tensor.element_size())
        for piece in tensor.reshape(-1).split(PIECE):
            report_progress()
            if piece.element_size() == 1:  # torch has few operations for eight bits
                piece = piece.float()
            if bool(torch.isfinite(piece).all()):
                continue
            if bool(torch.isnan(piece).any()):
                return "NaN"
            if not masks or bool(torch.isposinf(piece).any()):
                return "infinite values"
        return ""


def _stored(torch: Any, tensor: Any) -> Any:
    """Return the elements that a strided tensor has in memory, each once.

    An expanded tensor has any number of elements, and as a copy would take that much memory.
    """
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    if tensor.numel() > span:
        return tensor.as_strided((span,), (1,))
    return tensor


def _is_optimizer(thing: Dict[Any, Any]) -> bool:
    return bool(thing.keys() >= OPTIMIZER and thing["param_groups"])


def _section(name: str, otherwise: str) -> str:
    """Return "optimizer" for a name of such a state."""
    return "optimizer" if any(hint in name.lower() for hint in HINTS) else otherwise
