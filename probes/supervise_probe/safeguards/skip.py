"""The command `skip_step`: the next updates are not applied."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Deque, Dict

from ..errors import Refused
from .nonfinite import MOST, PER

if TYPE_CHECKING:
    from ..runtime.active_safeguards import InForce


class Skip:
    """Counts commanded skips; those of safeguards have a limit of their own."""

    def __init__(self, in_force: InForce) -> None:
        self._in_force = in_force
        self._left = 0
        self._now = 0
        self._taken: Deque[int] = deque()  # skipped steps among the newest PER

    def do_skip_step(self, args: Dict[str, Any]) -> Dict[str, Any]:
        """Skip the next `count` steps; no more than `most` in any PER of them."""
        count, most = max(0, int(args.get("count", 1))), int(args.get("most", MOST))
        spent = len(self._taken)
        if spent + count > most:
            raise Refused(
                f"skip_step of {count}: {most} updates may be skipped in {PER} steps, and {spent} "
                "were"
            )
        self._left = count
        self._in_force.acting = True
        return {"will_skip": count}

    def take(self) -> str:
        """Return why the next step is skipped, "" when it is not."""
        if not self._left:
            return ""
        self._left -= 1
        self._taken.append(self._now)
        return "command"

    @property
    def busy(self) -> bool:
        """Whether steps are to be skipped, or recent skips still count."""
        return self._left > 0 or bool(self._taken)

    def step_ended(self) -> None:
        """Count a step; a rollback does not reset the count."""
        self._now += 1
        while self._taken and self._now - self._taken[0] >= PER:
            self._taken.popleft()
