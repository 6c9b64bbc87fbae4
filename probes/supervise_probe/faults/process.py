"""Faults of the process: a crash, a hang, slow steps, memory, telemetry, a damaged checkpoint."""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar, Mapping

from . import Args, Call, CannotActError, Fault, Kwargs, Params, Value


class Crash(Fault):
    """Sends its own process a signal; other ranks lose a partner."""

    MEANING = "die inside the step"
    PARAMS: ClassVar[Params] = {"signal": (9, "its number")}

    def block(self) -> None:
        os.kill(os.getpid(), int(self.params["signal"]))


class Hang(Fault):
    """Sleeps, once."""

    MEANING = "block inside the step"
    PARAMS: ClassVar[Params] = {"seconds": (0.0, "how long; 0 means for ever")}

    def block(self) -> None:
        seconds = float(self.params["seconds"])
        end = time.monotonic() + seconds
        while not seconds or time.monotonic() < end:
            time.sleep(0.05)


class SlowCompute(Fault):
    """Sleeps inside each forward of the outermost module."""

    MEANING = "let each forward take longer for some steps"
    MOVES = "step_time"
    PARAMS: ClassVar[Params] = {
        "seconds": (0.05, "longer"),
        "steps": (100, "for so many steps"),
    }

    def __init__(self, torch: Any, params: Mapping[str, Value]) -> None:
        super().__init__(torch, params)
        self._handles: list[Any] = []

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        if not self._handles:
            self._handles.append(root.register_forward_pre_hook(self._sleep))
        return args, kwargs

    def end(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _sleep(self, module: Any, args: Any) -> None:
        time.sleep(float(self.params["seconds"]))


class SlowInput(Fault):
    """Sleeps before each forward."""

    MEANING = "wait in front of each forward for some steps"
    MOVES = "step_time"
    PARAMS: ClassVar[Params] = {
        "seconds": (0.1, "in front of each"),
        "steps": (100, "for so many steps"),
    }

    def forward(self, root: Any, args: Args, kwargs: Kwargs) -> Call:
        time.sleep(float(self.params["seconds"]))
        return args, kwargs


class MemoryCreep(Fault):
    """Keeps more memory in each step, until the fault ends."""

    MEANING = "hold on to more memory in each step"
    MOVES = "host_mem_growth"
    PARAMS: ClassVar[Params] = {
        "megabytes": (1.0, "more in each step"),
        "steps": (300, "for so many steps"),
    }

    def block(self) -> None:
        blocks: list[bytes] = self.__dict__.setdefault("kept", [])
        blocks.append(b"\1" * int(float(self.params["megabytes"]) * (1 << 20)))


class Blackout(Fault):
    """No frame is published."""

    MEANING = "publish no frames for some steps"
    PARAMS: ClassVar[Params] = {"steps": (100, "for so many steps")}
    silent = True


LACKS = {"optimizer": "optim", "scheduler": "sched", "rng": "rng", "noise": ""}


class BadCheckpoint(Fault):
    """Acts once, at the first checkpoint that the job saves while it acts."""

    MEANING = "damage the next checkpoint, once"
    PARAMS: ClassVar[Params] = {
        "how": (
            "flip",
            "flip (one byte in its middle), truncate (to half) or remove; found by an evaluation: "
            "noise (in one weight), optimizer, scheduler, rng (it is taken out)",
        ),
        "steps": (100000, "waits for so many steps"),
    }

    _done = False

    def after_save(self, path: str) -> None:
        if self._done or not os.path.isfile(path):
            return
        self._done = True
        size, manner = os.path.getsize(path), self.params["how"]
        if manner == "remove":
            os.unlink(path)
        elif manner == "truncate":
            os.truncate(path, size // 2)
        elif manner in LACKS:
            self._rewrite(path, LACKS[str(manner)])
        else:
            with open(path, "r+b") as file:
                file.seek(size // 2)
                byte = file.read(1)[0]
                file.seek(size // 2)
                file.write(bytes((byte ^ 0x40,)))

    def _rewrite(self, path: str, lacks: str) -> None:
        """Save its content again without the parts of that name, or with one weight changed."""
        torch: Any = self.torch
        content = torch.load(path, map_location="cpu", weights_only=True)
        names = [name for name in content if lacks and lacks in str(name).lower()]
        weights = (v for part in content.values() if isinstance(part, dict) for v in part.values())
        matrices = [w for w in weights if isinstance(w, torch.Tensor) and w.dim() > 1]
        if not names and (lacks or not matrices):
            raise CannotActError(f"nothing in the checkpoint is called {lacks or 'a weight'}")
        for name in names:
            del content[name]
        if not lacks:
            matrices[0].mul_(1.1)
        torch.save(content, path)
