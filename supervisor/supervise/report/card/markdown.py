"""The document as Markdown: for a pull request, an issue, a chat, or a plain pager."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import text

Part = Mapping[str, Any]

SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")


def summary(document: Part) -> str:
    """Return the text."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Part) -> Iterator[str]:
    run, opened = document["run"], document["opened"]
    yield f"# {document['severity']} {_plain(document['title'])}: {document['state']}"
    yield ""
    yield (
        f"{document['id']} of run {_plain(run['id'])}, step {opened['step']}, "
        f"{opened['wall'] or 'at an unknown time'}"
        + (f", host {_plain(run['host'])}" if run["host"] else "")
    )
    yield ""
    for name in (*text.SENTENCES, "next"):
        yield f"- **{name.capitalize()}** {_plain(document[name]['text'])}"
    if document["loss"]["spark"]:
        yield f"- **Loss** `{document['loss']['spark']}`"
    yield f"- **Evidence** {_plain(text.evidence(document))}"
    yield from _table(
        "Conditions",
        ("Reading", "Detector", "Value", "Limit", "Before"),
        [(one["code"], one["detector"], *text.cells(one)) for one in document["conditions"]],
    )
    yield from _table(
        "Actions",
        ("Step", "Action", "Outcome"),
        [(str(one["step"]), one["verb"], text.outcome(one)) for one in document["actions"]],
    )
    for failure in document["failures"][:1]:
        yield from ("", "## Error", "", _plain(failure["text"]))
        if failure["traceback"]:
            quoted = [f"    {line}" for line in failure["traceback"].rstrip().splitlines()]
            yield from ("", *map(_printable, quoted))
    yield from ("", "## Look closer", "")
    yield from (f"    {line}" for line in filter(None, document["replay"].values()))


def _table(heading: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    yield from ("", f"## {heading}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|")
    for row in rows:
        yield f"| {' | '.join(_plain(cell) for cell in row)} |"


def _plain(value: Any) -> str:
    """Return text of a job in one line, so that it can neither mark up nor link."""
    return SPECIAL.sub(r"\\\1", _printable(" ".join(str(value).split())))


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else " " for c in line)
