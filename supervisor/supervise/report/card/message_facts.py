"""What a message about an incident says beyond what the engine told: the facts of its document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...core.model.interfaces import APPROVAL, CLOSED, FINISHED, OPENED, Message

RULE = "rule "  # how the reason of a message about a rule begins


def with_document(message: Message, document: Mapping[str, Any]) -> Message:
    """Return a message with the incident's title in words, its card, and where the evidence is.

    What was done, what that cost and what proves it are told once something was done, or nothing
    more will be.
    """
    over = message.kind in (CLOSED, FINISHED)
    names: tuple[str, ...] = ()
    if message.kind == APPROVAL:
        names = ("cause",) if document["cause"]["known"] else ()
    elif over or document["did"]["acted"] is not False:
        names = ("cause", "did", "cost", "proof")
    card = [(name.capitalize(), str(document[name]["text"])) for name in names]
    if spark := document["loss"]["spark"]:
        card.append(("Loss", str(spark)))
    what = str(document["what"]["text"])
    then = message.next
    if over and document["evidence"]["bundles"]:
        evidence = f"evidence: {message.directory}/incidents/{message.incident}/"
        then = f"{then}; {evidence}" if then else evidence
    return replace(
        message,
        title=_title(message, document),
        verdict=what if message.kind == CLOSED else message.verdict or what,
        next=then,
        card=tuple(card),
    )


def _title(message: Message, document: Mapping[str, Any]) -> str:
    """Return "inc-1: Loss spike: what is new", or how it ended."""
    incident, words = message.incident, document["title"]
    if message.kind == FINISHED:
        return message.title
    if message.kind == CLOSED:
        return f"{incident}: {words} · {document['state']}"
    if message.kind == OPENED and message.why.startswith(RULE):
        return f"{incident}: {words} at step {message.step}"
    return f"{incident}: {words}: {message.title.removeprefix(f'{incident}: ')}"
