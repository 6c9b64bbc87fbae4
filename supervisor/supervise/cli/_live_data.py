"""Data of the live view, read from the files that `supervise status` reads."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import MISSHAPEN, StoreError
from ..runtime.status import line, read_curve
from ..store.files import locked
from ..store.run_directory import RunDir
from ._follow import HIDDEN, LogTail, event_line
from ._output import printable
from ._run_status import read_status
from .status import budgets_left, incidents, progress

EVENTS = 200  # kept
Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class View:
    """One look at a run, as text.

    Attributes:
        verdict, protection: one line. facts: label and text of each line about the training.
        incident: id, severity and headline of what is open, and the requests that wait.
        ranks: rank, lag in steps, phase, silence, notes; the one that lags most first.
        curve: loss over the run, finite values only. span: what it covers.
        events: the newest last. problem: why there is nothing newer.
    """

    verdict: str = "reading"
    protection: str = ""
    facts: Rows = ()
    incident: Sequence[str] = ()
    ranks: Sequence[tuple[str, ...]] = ()
    curve: Sequence[float] = ()
    span: str = ""
    events: Sequence[str] = ()
    problem: str = ""


@dataclass
class Reader:
    """Looks at a run again and again; one that has not changed is not read."""

    run: RunDir
    view: View = field(default_factory=View)

    def __post_init__(self) -> None:
        self._tail = LogTail(self.run.audit_path)
        self._events: deque[str] = deque(maxlen=EVENTS)
        self._seen: tuple[object, ...] = ()

    def look(self) -> View:
        """Return the newest view; a file that cannot be read is its `problem`."""
        try:
            stamp = (_stamp(self.run, "state.json"), _stamp(self.run, "audit.log"))
            seen = (*stamp, locked(self.run.audit_path))
            if seen == self._seen and not self.view.problem:
                return self.view
            self._seen = seen
            for record in self._tail.read():
                if str(record.get("kind")) not in HIDDEN:
                    self._events.append(printable(event_line(record)))
            state = read_status(self.run, verified=False)
            self.view = view_of(state, list(self._events))
        except StoreError as error:
            self.view = View(verdict="unknown", problem=str(error), events=list(self._events))
        except MISSHAPEN as error:
            problem = f"the status cannot be understood: {type(error).__name__}"
            self.view = View(verdict="unknown", problem=problem, events=list(self._events))
        return self.view


def _stamp(run: RunDir, name: str) -> tuple[int, int] | None:
    try:
        found = (run.path / name).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def view_of(state: Mapping[str, Any], events: Sequence[str] = ()) -> View:
    """Return the view of a status."""
    training: Mapping[str, Any] = state.get("training") or {}
    steps, losses = read_curve(training)
    finite = [loss for loss in losses if math.isfinite(loss)]
    return View(
        verdict=printable(str(state["verdict"])),
        protection=printable(line(state["can"])) if state.get("can") else "",
        facts=[(label, printable(text)) for label, text in _facts(state)],
        incident=[printable(text) for text in _open(state)],
        ranks=_ranks(state),
        curve=finite,
        span=_span(steps, finite, len(losses) - len(finite)),
        events=events,
    )


def _facts(state: Mapping[str, Any]) -> Rows:
    if "state" not in state:
        return [("state", "no status was written yet")]
    rows = [(label, text.partition("  ")[0]) for label, text in progress(state)]
    rows.append(("state", f"{state['state']}, mode {state.get('mode', '?')}"))
    if budgets := state.get("budgets"):
        rows.append(("budgets", ", ".join(budgets_left(budgets))))
    broken = state.get("channels") or {}
    rows += [
        ("channel", f"{name}: {how['undelivered']} undelivered") for name, how in broken.items()
    ]
    return rows


def _open(state: Mapping[str, Any]) -> list[str]:
    lines = []
    for one in incidents(state):
        acked = f" (acknowledged by {one['acked']})" if one.get("acked") else ""
        head = f"{one.get('id')} {one.get('severity')} {one.get('phase')}"
        lines.append(f"{head}: {one.get('headline')}{acked}")
    for one in state.get("approvals") or ():
        text = f"{one['id']} waits for approval: {one['runbook']}, {one['left_s']} s left"
        lines += [text]
    return lines


def _ranks(state: Mapping[str, Any]) -> list[tuple[str, ...]]:
    lags: Mapping[str, int] = (state.get("training") or {}).get("lag") or {}
    rows = []
    for rank, probe in (state.get("ranks") or {}).items():
        lag, silent_s = lags.get(rank, 0), float(probe.get("silent_s") or 0.0)
        notes = ["paused"] if probe.get("paused") else []
        off = [n for n, how in (probe.get("collectors") or {}).items() if how != "on"]
        notes += [f"{len(off)} collectors off"] if off else []
        key = (-lag, -silent_s, int(rank))
        texts = (str(rank), str(lag), str(probe.get("phase", "?")), f"{silent_s:.1f} s")
        rows.append((key, (*texts, ", ".join(notes))))
    return [texts for _, texts in sorted(rows)]


def _span(steps: Sequence[int], finite: Sequence[float], wrong: int) -> str:
    if not steps:
        return "no loss yet"
    text = f"step {steps[0]} to {steps[-1]}"
    if finite:
        text += f", {min(finite):.4g} to {max(finite):.4g}"
    return text + (f", {wrong} not finite" if wrong else "")
