"""The messages that people receive, produced by the engine and rendered by the notifiers.

Each story with a title is printed, in order: what the operator sends, the answer, why an action was
suppressed or failed, and every message as the console prints it. Review the wording here.
"""

from __future__ import annotations

from collections.abc import Iterator

from supervise.core.model import Decision, Notified
from supervise.notifiers import message_of, render_console

from .stories import RUN, STORIES, played

HEAD = "42 9c1b"
RECORDED = ("suppressed", "abort", "in_doubt")  # kinds whose reason `supervise why` shows


def lines_of(decision: Decision, frame: int) -> Iterator[str]:
    """Yield the lines that people read of one decision."""
    data = decision.data
    if isinstance(decision, Notified):
        yield f"[frame {frame}] {decision.message.kind}, {decision.incident or 'no incident'}:"
        yield render_console(message_of(decision, RUN, HEAD), colour=False).rstrip("\n")
    elif decision.kind == "note" and data.get("what") == "operator":
        args = " ".join(f"{name}={value}" for name, value in data["args"].items())
        yield f"[frame {frame}] $ supervise {data['command']} {args}".rstrip()
        yield f"    {'ok' if data['ok'] else 'refused'}: {data['answer']}"
    elif decision.kind in RECORDED:
        yield f"[frame {frame}] {decision.kind}: {decision.reason}"


def messages() -> str:
    """Return the whole file."""
    text: list[str] = []
    for name, story in STORIES.items():
        if "title" in story:
            words = (story["policy"], *([story["mode"]] if "mode" in story else ()))
            text += ["", f"== {story['title']} ({', '.join(words)})"]
            for frame, decision in played(name).log:
                text += lines_of(decision, frame)
    return "\n".join(text[1:]) + "\n"
