"""The terminal: a few short lines on stderr, and only when something has changed.

The job shares stderr, so each line starts with `supervise: ` and a message is one write. Colour
only on a terminal, and not if NO_COLOR is set (https://no-color.org).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

from ..core.model.formats import printable
from ..core.model.interfaces import Message, NotifyError, Severity
from ..system import terminal_columns, wrap
from ._channel_settings import ChannelSettings, Sender, clip_text, message_sentences

PREFIX = "supervise: "
WIDTH = 300  # characters
LONG = 1000  # of commands, which must stay whole: each names the run directory

_COLOURS = {"SEV0": "1;31", "SEV1": "31", "SEV2": "33"}


@dataclass(frozen=True, kw_only=True)
class Console(ChannelSettings):
    """Lines on standard error."""

    min_sev: Severity = "INFO"

    def open(self, env: Mapping[str, str]) -> Sender:
        """Return the sender."""
        stream = sys.stderr
        plain = env.get("NO_COLOR") or env.get("TERM") == "dumb" or not stream.isatty()
        return ConsoleSender(stream, colour=not plain, min_sev=self.min_sev)


class ConsoleSender:
    """Writes to one stream."""

    name = "console"
    group_s = 0.0
    gap_s = 0.0
    per_hour: int | None = None

    def __init__(self, stream: TextIO, *, colour: bool, min_sev: Severity = "INFO") -> None:
        self.min_sev: Severity = min_sev
        self._stream = stream
        self._colour = colour
        self._shown: dict[str | None, str] = {}

    def send(self, message: Message, *, key: str) -> str:
        """Print, unless it repeats the last message. Raises NotifyError if stderr is closed."""
        width = terminal_columns(self._stream)
        text = render_console(message, colour=self._colour, width=width)
        content = render_console(message, colour=False).replace(f"step {message.step}", "")
        if self._shown.get(message.incident) == content:
            return "unchanged, not printed"
        try:
            _write(self._stream, text)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            sentence = f"standard error cannot be written: {reason}"
            raise NotifyError(sentence, retry_after_s=None) from None
        self._shown[message.incident] = content
        return "printed"


def _write(stream: TextIO, text: str) -> None:
    """Write `text` and wait until it is written. Raises OSError or ValueError."""
    deliver = getattr(stream, "deliver", None)  # of a stream that queues writes
    if deliver is not None:
        deliver(text)
        return
    stream.write(text)
    stream.flush()


def render_console(message: Message, *, colour: bool, width: int = 0) -> str:
    """Return the lines of one message, wrapped to the columns of a terminal; 0: as they are."""
    title = clip_text(printable(message.title), WIDTH)
    position = f"step {message.step}" if message.step >= 0 else "before the first step"
    place = "" if f"at {position}" in title else f" ({position})"
    lines = [f"{message.severity} {title}{place}"]
    parts = ((head.lower(), text) for head, text in message_sentences(message))
    texts = (*parts, *message.facts)
    for head, text in texts:
        if text:
            limit = LONG if head == "next" else WIDTH
            lines.append(f"  {printable(head):4}  {clip_text(printable(text), limit)}")
    room = max(width - len(PREFIX), 0)
    shown = "".join(f"{PREFIX}{piece}\n" for line in lines for piece in wrap(line, room))
    style = _COLOURS.get(message.severity) if colour else None
    coloured = f"\033[{style}m{message.severity}\033[0m"
    return shown if style is None else shown.replace(message.severity, coloured, 1)
