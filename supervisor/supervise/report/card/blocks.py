"""The document for a message: a title line, its sentences, the loss. Plain text; the channel
escapes, cuts and lays out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .text import SENTENCES


@dataclass(frozen=True, slots=True)
class Blocks:
    """What a message about an incident says.

    Attributes:
        title: "Loss spike after a learning-rate jump · RECOVERED". severity, state: apart, too.
        sentences: `(What | Cause | Did | Cost | Proof | Next, text)`, in that order.
        spark: of the loss, "" where none is known.
        facts: `(name, value)` for a small table: run, step, host, policy, rank.
    """

    title: str
    severity: str
    state: str
    sentences: tuple[tuple[str, str], ...]
    spark: str
    facts: tuple[tuple[str, str], ...]


def blocks(document: Mapping[str, Any]) -> Blocks:
    """Return the parts of a message about an incident."""
    run, opened, scope = document["run"], document["opened"], document["scope"]
    attempt = f" of attempt {opened['attempt']}" if opened["attempt"] else ""
    rank = "" if scope["rank"] is None else str(scope["rank"])
    facts = (
        ("Run", run["id"]),
        ("Step", f"{opened['step']}{attempt}"),
        ("Host", run["host"]),
        ("Policy", f"{run['policy']} ({run['mode']})" if run["policy"] else ""),
        ("Rank", rank),
        ("Shards", ", ".join(scope["shards"][:4])),
    )
    return Blocks(
        f"{document['title']} · {document['state']}",
        document["severity"],
        document["state"],
        tuple((name.capitalize(), str(document[name]["text"])) for name in (*SENTENCES, "next")),
        str(document["loss"]["spark"]),
        tuple((name, value) for name, value in facts if value),
    )
