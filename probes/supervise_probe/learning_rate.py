"""The learning rate: scaled just before the optimizer uses it, put back right after.

So it composes with every scheduler, and with loops that write `group["lr"]` each step: the job's
own schedule never sees the scale. Knows no policy and no drill.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple


class Ramp:
    """A factor that starts at `value` and goes linearly to 1 over `steps`; 0 steps: it stays.

    Attributes:
        now: the factor of the step under way. moves: whether that of the next one may differ.
    """

    __slots__ = ("_done", "_steps", "_value", "moves", "now")

    def __init__(self, value: float = 1.0, steps: int = 0) -> None:
        self._value = self.now = value
        self._steps = steps
        self._done = 0
        self.moves = steps > 0

    @property
    def progress(self) -> float:
        """How far the ramp is in the step under way, from 0 to 1; 1 where there is none."""
        return self._done / self._steps if self.moves else 1.0

    def advance(self) -> None:
        """A step ended."""
        if self.moves:
            self._done += 1
            self.moves = self._done < self._steps
            done = self._done / self._steps
            self.now = self._value + (1.0 - self._value) * done if self.moves else 1.0


class LearningRate:
    """The probe's hand on the learning rates of all optimizers.

    Attributes:
        held: what `lr_scale` asked for.
        warming: the re-warm ramp after a rollback or a relaunch; both factors are multiplied.
    """

    def __init__(self, torch: Any, rewarm: Optional[Mapping[str, Any]] = None) -> None:
        """Begin; with `rewarm` (`{"start", "steps"}`) as after a rollback."""
        self._torch = torch
        self.held = Ramp()
        self.warming = Ramp(float(rewarm["start"]), int(rewarm["steps"])) if rewarm else Ramp()
        self._changed: List[Tuple[Dict[str, Any], Any, Any, float]] = []

    def factor(self) -> float:
        """Return the multiplier of the step under way, drills excluded."""
        return self.held.now * self.warming.now

    def apply(self, optimizer: Any, factor: float) -> None:
        """Multiply the rate of every group by `factor` until `restore`."""
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, self._torch.Tensor):
                own = rate.clone()
                self._changed.append((group, own, rate, factor))
                with self._torch.no_grad():
                    rate.mul_(factor)  # in place: a compiled or captured step holds this tensor
            elif rate is not None:
                used = rate * factor
                self._changed.append((group, rate, used, factor))
                group["lr"] = used

    @property
    def changed(self) -> bool:
        """Whether a rate is scaled now."""
        return bool(self._changed)

    def restore(self) -> None:
        """Put back what the job had set, bit for bit."""
        while self._changed:
            group, own, used, factor = self._changed.pop()
            if group.get("lr") is not used:  # the optimizer chose a new rate during its step
                group["lr"] = group["lr"] / factor
            elif isinstance(used, self._torch.Tensor):
                with self._torch.no_grad():
                    used.copy_(own)
            else:
                group["lr"] = own

    def advance(self) -> None:
        """A step ended."""
        for ramp in (self.held, self.warming):
            if ramp.moves:
                ramp.advance()
