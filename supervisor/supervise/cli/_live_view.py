"""The full-screen view of a run. Imported by `supervise watch` only: it needs textual."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, RichLog, Sparkline, Static

from ..core.model.events import LossCurve
from ..core.model.formats import printable
from ..errors import MISSHAPEN, StoreError, SuperviseError
from ..runtime.status import Status, format_capabilities
from ..store.files import is_locked
from ..store.run_directory import RunDir
from ._runs import HIDDEN, LogTail, event_line
from .operate import send_and_wait
from .status import (
    RunStatus,
    budgets_left,
    current_incidents,
    read_status,
    state_text,
    training_progress,
)

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
            stamps = (*stamp, is_locked(self.run.audit_path))
            if stamps == self._seen and not self.view.problem:
                return self.view
            self._seen = stamps
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
        status = (run.path / name).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def view_of(state: RunStatus, events: Sequence[str] = ()) -> View:
    """Return the view of a status."""
    newest = state.newest
    curve = LossCurve() if newest is None else newest.training.curve
    finite = [loss for loss in curve.loss if math.isfinite(loss)]
    return View(
        verdict=printable(state.verdict),
        protection=printable(format_capabilities(newest.can))
        if newest is not None and newest.can
        else "",
        facts=[(label, printable(text)) for label, text in _facts(state)],
        incident=[printable(text) for text in _open(state)],
        ranks=() if newest is None else _ranks(newest),
        curve=finite,
        span=_span(curve.steps, finite, len(curve.loss) - len(finite)),
        events=events,
    )


def _facts(state: RunStatus) -> Rows:
    newest = state.newest
    if newest is None:
        return [("state", "no status was written yet")]
    rows = training_progress(newest, state.life)
    rows.append(("state", f"{state_text(newest.state)}, mode {newest.mode}"))
    if newest.budgets:
        rows.append(("budgets", ", ".join(budgets_left(newest.budgets))))
    broken = (newest.channels or {}).items()
    rows += [("channel", f"{name}: {channel.undelivered} undelivered") for name, channel in broken]
    return rows


def _open(state: RunStatus) -> list[str]:
    lines = []
    for incident in current_incidents(state):
        acked = f" (acknowledged by {incident.acked})" if incident.acked else ""
        lines.append(f"{incident.text}{acked}")
    lines += [
        f"{request.id} waits for approval: {request.runbook}, {request.left_s} s left"
        for request in (state.newest.approvals if state.newest else ())
    ]
    return lines


def _ranks(status: Status) -> list[tuple[str, ...]]:
    rows = []
    for rank, probe in status.rank_states().items():
        lag, silent_s = status.training.lag.get(rank, 0), probe.silent_s
        notes = ["paused"] if probe.paused else []
        off = [name for name, state in probe.collectors.items() if state != "on"]
        notes += [f"{len(off)} collectors off"] if off else []
        key = (-lag, -silent_s, int(rank))
        texts = (rank, str(lag), probe.phase or "?", f"{silent_s:.1f} s")
        rows.append((key, (*texts, ", ".join(notes))))
    return [texts for _, texts in sorted(rows)]


def _span(steps: Sequence[int], finite: Sequence[float], wrong: int) -> str:
    if not steps:
        return "no loss yet"
    text = f"step {steps[0]} to {steps[-1]}"
    if finite:
        text += f", {min(finite):.4g} to {max(finite):.4g}"
    return text + (f", {wrong} not finite" if wrong else "")


EVERY_S = 0.5  # between two looks; the status is written once a second
# Key -> command and what it does, as the question has it.
ORDERS = {
    "p": ("pause", "Pause the job at its next step boundary?"),
    "r": ("resume", "Continue the paused job?"),
    "a": ("ack", "Acknowledge the open incident? Its reminders stop."),
    "s": ("savepoint", "Save the training state in memory, for a later rollback?"),
}
HELP = """\
p  pause the job            r  resume it
a  acknowledge the incident s  take a savepoint
q  quit                     ?  this help

Each command is asked about first, and goes into
the audit log under your name. Quitting changes
nothing: the run goes on.

Any key closes this."""


class Question(ModalScreen[bool]):
    """Asks before something changes the run; only `y` means yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,enter,q", "answer(False)", "no"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """One box with the question."""
        yield Static(f"{self._text}\n\n\\[y] yes   \\[n] no", classes="box")

    def action_answer(self, yes: bool) -> None:
        """Close with the answer."""
        self.dismiss(yes)


class Help(ModalScreen[None]):
    """The keys."""

    def compose(self) -> ComposeResult:
        """One box with the text."""
        yield Static(HELP, classes="box", markup=False)

    def on_key(self) -> None:
        """Close."""
        self.dismiss()


class LiveView(App[None]):
    """Shows a run until `q`.

    Args:
        run: the run.
        by: the operator's name for commands, None for the login.

    Attributes:
        receipt: what remains on the terminal afterwards.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #verdict { height: auto; max-height: 3; padding: 0 1; text-style: bold reverse; }
    #upper { height: 8; }
    #protection { height: auto; max-height: 3; padding: 0 1; }
    #facts { width: 1fr; padding: 0 1; }
    #loss { width: 1fr; border: round $primary; }
    #loss Sparkline { height: 1fr; }
    #incident { height: auto; max-height: 4; padding: 0 1; text-style: bold; }
    #ranks { height: auto; max-height: 30%; }
    #events { height: 1fr; border-top: solid $primary; padding: 0 1; scrollbar-size: 0 0; }
    #answer { height: auto; max-height: 3; padding: 0 1; text-style: italic; display: none; }
    .box { width: 56; height: auto; padding: 1 2; border: round $warning; background: $surface; }
    Question, Help { align: center middle; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key, f"order('{key}')", name) for key, (name, _) in ORDERS.items()),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, run: RunDir, by: str | None = None) -> None:
        super().__init__()
        self._run_dir, self._by = run, by
        self._reader = Reader(run)
        self._shown: View | None = None
        self.receipt = f"run {run.id}: not read"

    def compose(self) -> ComposeResult:
        """Lay the parts out, the most important on top."""
        yield Static("reading", id="verdict", markup=False)
        yield Static("", id="incident", markup=False)
        with Horizontal(id="upper"):
            yield Static("", id="facts", markup=False)
            with Vertical(id="loss"):
                yield Sparkline([])
        yield Static("", id="protection", markup=False)
        table: DataTable[str] = DataTable(id="ranks", cursor_type="none", zebra_stripes=True)
        table.can_focus = False
        yield table
        yield RichLog(id="events", max_lines=200, wrap=False, markup=False)
        yield Static("", id="answer", markup=False)
        yield Footer(show_command_palette=False)

    async def on_mount(self) -> None:
        """Begin to look."""
        self.query_one(DataTable).add_columns("rank", "lag", "phase", "silent", "")
        self.query_one("#loss").border_title = "loss"
        await self.look()
        self.set_interval(EVERY_S, self.look)

    async def look(self) -> None:
        """Read the run on a thread, since a disk may hang, and show what changed."""
        view = await asyncio.to_thread(self._reader.look)
        if view is not self._shown:
            self._show(view)

    def _show(self, view: View) -> None:
        previous, self._shown = self._shown, view
        verdict = f"{view.verdict}: {view.problem}" if view.problem else view.verdict
        self.receipt = f"run {self._run_dir.id}: {verdict}"
        self.query_one("#verdict", Static).update(self.receipt.removeprefix("run "))
        self.query_one("#protection", Static).update(view.protection)
        width = max((len(label) for label, _ in view.facts), default=0)
        lines = [f"{label:<{width}}  {text}" for label, text in view.facts]
        self.query_one("#facts", Static).update("\n".join(lines))
        self.query_one(Sparkline).data = list(view.curve)
        self.query_one("#loss").border_subtitle = view.span
        self.query_one("#incident", Static).update("\n".join(view.incident))
        table = self.query_one(DataTable)
        table.clear()
        for row in view.ranks:
            table.add_row(*row)
        table.display = bool(view.ranks)
        if previous is None or previous.events != view.events:
            log = self.query_one(RichLog)
            log.clear()
            for text in view.events:
                log.write(text)

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(Help())

    def action_order(self, key: str) -> None:
        """Ask, then send a command."""
        name, question = ORDERS[key]

        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(self._send_order(name), exclusive=True, group="order")

        self.push_screen(Question(question), answered)

    async def _send_order(self, name: str) -> None:
        answer = self.query_one("#answer", Static)
        answer.display = True
        answer.update(f"{name}: sent, no answer yet")
        try:
            lines = (
                await asyncio.to_thread(send_and_wait, self._run_dir.path, name, self._by, {})
            ).lines
        except SuperviseError as error:
            lines = [str(error)]
        answer.update("\n".join(printable(f"{name}: {text}") for text in lines))
