"""The full-screen view of a run. Imported by `supervise watch` only: it needs textual."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, RichLog, Sparkline, Static

from ..errors import SuperviseError
from ..store.run_directory import RunDir
from ._live_data import Reader, View
from ._send_command import ask

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
        before, self._shown = self._shown, view
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
        if before is None or before.events != view.events:
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
            lines = (await asyncio.to_thread(ask, self._run_dir.path, name, self._by, {})).lines
        except SuperviseError as error:
            lines = [str(error)]
        answer.update("\n".join(f"{name}: {text}" for text in lines))
