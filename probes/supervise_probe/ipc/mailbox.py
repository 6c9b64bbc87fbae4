"""Commands from the supervisor, and what the probe answers and reports.

A command is handed out once. Whoever carries it out answers with `ack`; the answer is remembered by
the command's key, so that a supervisor which asks again, after a crash or out of impatience, gets
the same answer and changes nothing twice.

Knows no verb: `poll` hands them out, the hooks carry them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Optional

from .. import wire
from .writer import to_json

if TYPE_CHECKING:
    from .writer import Writer

KEPT_KEYS = 4 * wire.LETTER_SLOTS  # more than the ring can ever hold at once


class Command(NamedTuple):
    """One order. `id` counts letters, `key` is the supervisor's: the same order, the same key."""

    id: int
    key: str
    verb: str
    args: Dict[str, Any]


class Mailbox:
    """The probe's end of both letter rings.

    Attributes:
        bad: commands that were overwritten before they were read, or could not be read.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._commands: wire.Ring[bytes] = wire.Ring(
            wire.LETTER_SLOTS, writer.command_slot, wire.unpack_letter
        )
        self._answers: Dict[str, Optional[bytes]] = {}  # None while it is being carried out
        self.bad = 0

    def poll(self) -> List[Command]:
        """Return the commands that have come; one 8-byte read when there are none."""
        head = self._writer.commands_head()
        if head == self._commands.next:
            return []
        commands = []
        for seq, lost, raw in self._commands.take(head, wire.LETTER_SLOTS):
            command = None if raw is None else _command(seq, raw)
            if command is None:
                self.bad += lost or 1
            elif command.key not in self._answers:
                self._remember(command.key)
                commands.append(command)
            else:
                answer = self._answers[command.key]
                if answer is not None:
                    self._writer.post(answer)
        return commands

    def ack(
        self,
        command: Command,
        step: int,
        ok: bool,
        result: Mapping[str, Any],
        error: Optional[str] = None,
    ) -> None:
        """Answer a command: what was observed, or why it was refused. Long results are clipped."""
        answer = _fit(
            {"ack": command.key, "verb": command.verb, "step": step, "ok": ok, "error": error},
            "result",
            result,
        )
        self._answers[command.key] = answer
        self._writer.post(answer)

    def repeat(self, key: str) -> bool:
        """Send the answer to a command once more; False: there is none yet."""
        answer = self._answers.get(key)
        if answer is not None:
            self._writer.post(answer)
        return answer is not None

    def notice(
        self, kind: str, message: str, step: int, data: Optional[Mapping[str, Any]] = None
    ) -> None:
        """Report something about the watching itself; see `Notice` for the kinds."""
        letter = {"notice": kind, "message": message, "step": step, "frame": self._writer.frames}
        self._writer.post(_fit(letter, "data", data or {}))

    def _remember(self, key: str) -> None:
        if len(self._answers) >= KEPT_KEYS:
            answered = (old for old, answer in self._answers.items() if answer is not None)
            oldest = next(answered, None)
            if oldest is not None:
                del self._answers[oldest]
        self._answers[key] = None


def _command(seq: int, raw: bytes) -> Optional[Command]:
    try:
        letter = wire.from_json(raw)
        command = Command(seq, letter["key"], letter["verb"], letter["args"])
    except (wire.WireError, KeyError, TypeError):
        return None
    is_command = isinstance(command.key, str) and isinstance(command.verb, str)
    return command if is_command and isinstance(command.args, dict) else None


def _fit(letter: Dict[str, Any], field: str, detail: Mapping[str, Any]) -> bytes:
    essential = ("ack", "verb", "notice")
    try:
        return to_json({**letter, field: dict(detail)}, wire.LETTER_ROOM, essential=essential)
    except wire.WireError as error:
        # That there is an answer matters more than its detail.
        left_out = {field: {"left_out": str(error)}}
        return to_json({**letter, **left_out}, wire.LETTER_ROOM, essential=essential)
