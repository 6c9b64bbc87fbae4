"""Facts from an incident's document that its messages add to those of the engine."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...core.model.interfaces import APPROVAL, CLOSED, FINISHED, OPENED, LossCurve, Message

RULE = "rule "  # how the reason of a message about a rule begins
EXPRESSION = re.compile(r"(\brule [\w.]+): [^;]*")  # what it is made of is for the page


def with_document(message: Message, document: Mapping[str, Any]) -> Message:
    """Return a message with the incident's title in words, its card, and where the evidence is."""
    over = message.kind in (CLOSED, FINISHED)
    what = str(document["what"]["text"])
    verdict = what if message.kind == CLOSED else message.verdict or what
    card = _card(message, document, f"{verdict} {message.why}")
    if spark := document["loss"]["spark"]:
        card.append(("Loss", str(spark)))
    then = message.next
    if over and document["evidence"]["bundles"] and "evidence: " not in then:
        evidence = f"evidence: {message.directory}/incidents/{message.incident}/"
        then = f"{then}; {evidence}" if then else evidence
    return replace(
        message,
        title=_title(message, document),
        verdict=verdict,
        why=EXPRESSION.sub(r"\1", message.why),
        next=then,
        card=tuple(card),
        curve=_curve(document) if over else None,
    )


def _curve(document: Mapping[str, Any]) -> LossCurve | None:
    series, metric = document["series"] or {}, document["loss"]["metric"]
    values = series.get("signals", {}).get(metric)
    if not values:
        return None
    known = [float(v) if isinstance(v, (int, float)) else math.nan for v in values]
    steps, opened = series["steps"], int(series["opened_at"])  # an index
    return LossCurve(metric, steps[min(opened, len(steps) - 1)], steps, series["attempts"], known)


def _card(message: Message, document: Mapping[str, Any], read: str) -> list[tuple[str, str]]:
    """Return Cause, Did, Cost and Proof, as far as there is anything to say.

    Before the end an unknown cause is left out, what an action under way will cost and come to, and
    what people have just read.
    """
    if message.kind in (CLOSED, FINISHED):
        names: tuple[str, ...] = ("cause", "did", "cost", "proof")
    else:
        names = ("cause",) if document["cause"]["known"] else ()
        if message.kind != APPROVAL:
            skipped = ("did",) if document["cost"]["skipped"] else ()
            names += {True: ("did", "cost", "proof"), None: ("did",), False: skipped}[
                document["did"]["acted"]
            ]
    found = [(name.capitalize(), str(document[name]["text"])) for name in names]
    return [(h, t) for h, t in found if t.removeprefix("not yet: ") not in read]


def _title(message: Message, document: Mapping[str, Any]) -> str:
    """Return "inc-1: Loss spike: what is new", or how it ended."""
    incident, words = message.incident, document["title"]
    if document["cause"]["kind"] == "drill":
        words += " (drill)"
    if message.kind == CLOSED:
        return f"{incident}: {words} · {document['state']}"
    if message.kind == OPENED and message.why.startswith(RULE):
        return f"{incident}: {words} at step {message.step}"
    news = message.title.removeprefix(f"{incident}: ")
    return f"{incident}: {words}" if news in words else f"{incident}: {words}: {news}"
