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
from ._channel_settings import ChannelSettings, Sender, clip_text, message_sentences

PREFIX = "supervise: "
WIDTH = 300  # characters; a terminal wraps, a log file does not
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
        text = render_console(message, colour=self._colour)
        content = text.replace(f"step {message.step}", "")
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


def render_console(message: Message, *, colour: bool) -> str:
    """Return the lines of one message."""
    severity: str = message.severity
    if colour and severity in _COLOURS:
        severity = f"\033[{_COLOURS[severity]}m{severity}\033[0m"
    title = clip_text(printable(message.title), WIDTH)
    position = f"step {message.step}" if message.step >= 0 else "before the first step"
    lines = [f"{severity} {title}" + ("" if f"at {position}" in title else f" ({position})")]
    parts = ((head.lower(), text) for head, text in message_sentences(message))
    texts = (*parts, *message.facts)
    for head, text in texts:
        if text:
            width = LONG if head == "next" else WIDTH
            lines.append(f"  {printable(head):4}  {clip_text(printable(text), width)}")
    return "".join(f"{PREFIX}{line}\n" for line in lines)
