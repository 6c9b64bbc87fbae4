"""Paths that the job writes again sooner than a verification comes to its end."""

from __future__ import annotations

from pathlib import Path

from .notifications import CheckpointNotifications

OFTEN = 5  # times without a verdict, until people hear of it; project default


class OverwriteTracker:
    """Remembers a path from the first time that it was overtaken until a verdict comes in time."""

    def __init__(self, news: CheckpointNotifications) -> None:
        self._news = news
        self._times: dict[str, int] = {}  # since the last verdict

    def __contains__(self, path: str) -> bool:
        return path in self._times

    def __len__(self) -> int:
        return len(self._times)

    def again(self, path: str) -> None:
        """It was written again before there was a verdict; what is gone is no such path."""
        times = {**self._times, path: self._times.get(path, 0) + 1}
        self._times = {path: count for path, count in times.items() if Path(path).exists()}
        if self._times.get(path) == OFTEN:
            self._news.say(
                f"{path} was written again {OFTEN} times in a row before it was verified: none of "
                "these is known to be good",
                once=f"overtaken {path}",
            )

    def judged(self, path: str, *, again: bool) -> None:
        """There is a verdict. Args: again: what lies there by now is another checkpoint."""
        if again:
            self._times[path] = 0
        else:
            self._times.pop(path, None)
