"""Names and messages use the field's terms: the project's old private vocabulary is refused."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_architecture import Module, read_modules, within

ROOT = Path(__file__).parents[1]

# A part of a name -> what to write instead.
REFUSED = {
    **dict.fromkeys(("tell", "tells", "telling", "told"), "report, notify, render, received"),
    **dict.fromkeys(("say", "says", "said", "saying"), "report, print, message, text, detail"),
    **dict.fromkeys(("speak", "speaks", "spoken"), "send, report, mention"),
    **dict.fromkeys(("hear", "hears", "heard"), "received, seen, on_..."),
    **dict.fromkeys(("word", "words"), "command (an operator's), text, token"),
    **dict.fromkeys(("nobody", "who", "whom"), "none, the noun itself: owner, sender, operator"),
    **dict.fromkeys(("mend", "mended", "mends"), "recovered, repaired"),
    **dict.fromkeys(("evil", "evils"), "injection"),
    **dict.fromkeys(("hunt", "hunted"), "mutation, run_mutations"),
    **dict.fromkeys(("played", "player"), "result, runner"),
    **dict.fromkeys(("spare", "sparing"), "retain, retention, reserve"),
    **dict.fromkeys(("stranger", "strangers"), "unknown, unmatched"),
    **dict.fromkeys(("hurry", "hurries"), "priority, verify_now"),
    "anew": "session_started, retry, again",
    "astray": "wrong_checkpoint",
    "torn": "truncated, partial, oversized",
    "begun": "started, startup",
    "stood": "stalled",
    "unmuted": "uninhibited, active",
    "waited": "run_deferred",
    "beside": "out_of_process, alongside",
    "gone": "missing, removed, exited",
    "desk": "processor, event_processor",
    "bank": "monitor, rank_monitor",
    "rung": "level, escalation_level",
    "pace": "frame_count",
    "company": "enricher",
    "keeper": "verifier, scheduler",
    "afterlife": "exit_status",
    "lane": "queue",
    "reel": "replay_queue",
    "tally": "count",
    "shelf": "store",
    "graft": "apply",
    "scene": "scope",
    "spot": "location",
    "bag": "set_value",
    "calm": "quiet, lower_priority",
    "outlook": "availability",
    "taint": "mark_suspect",
}
ALSO_TORCH = frozenset({"EmbeddingBag"})  # another project's name
ALLOWED = 121  # names in the product that still hold such a part; may only fall

# In texts that people receive. Longest first: a phrase is reported once.
PHRASES = {
    r"looks? after": "handles, owns",
    r"what (it|this|they) came to": "the outcome",
    r"by then|by now": "meanwhile; has changed",
    r"stood still|stands? still": "stalled, makes no progress",
    r"speaks? again": "silence removed",
    r"is yours": "acknowledged",
    r"anew": "again",
    r"nobody|of who\b|whom": "name the person, the owner or the receiver",
    r"told|tells?|telling": "reported, reports; notified",
    r"\bsaid\b|\bsaying\b": "reported",
    r"heard|hears?\b": "received",
    r"astray": "started from the wrong checkpoint",
    r"torn|begun": "truncated, oversized; started",
    r"mended": "recovered, repaired",
    r"as good as none": "say what the reader loses",
}
PHRASES_ALLOWED = 1
DOCUMENTS = (
    *("README.md", "SECURITY.md", "CHANGELOG.md", "supervisor/README.md"),
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
    *("supervisor/DECISIONS.md", "policies/README.md", "runbooks/README.md", "probes/README.md"),
)


def names(module: Module) -> Iterator[str]:
    """Yield every identifier that a module defines or uses."""
    for node in module.nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.alias(name=name, asname=other):
                yield from (other or name).split(".")


@cache
def parts(name: str) -> list[str]:
    """Return the words of an identifier: `_spare_until`, `RunTold`, `TOLD` -> lower case."""
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def refused(module: Module) -> list[tuple[str, str]]:
    """Return `(name, refused part)` for each distinct name of a module, its own name included."""
    found = {*names(module), module.name.rpartition(".")[2]} - ALSO_TORCH
    return [(name, part) for name in sorted(found) for part in parts(name) if part in REFUSED]


def in_product() -> list[str]:
    return [
        f"{module.path}: {name} holds {part!r}; use {REFUSED[part]}"
        for module in read_modules()
        if within(module.name, ("supervise", "supervise_probe", "supervise_offline"))
        for name, part in refused(module)
    ]


def in_texts() -> list[str]:
    return [
        f"{file}:{number}: {match.group()!r}; use {advice}"
        for file in ("tests/golden/messages.txt", "tests/golden/help.txt", *DOCUMENTS)
        for number, line in enumerate((ROOT / file).read_text("utf-8").splitlines(), 1)
        for pattern, advice in PHRASES.items()
        for match in re.finditer(rf"\b(?:{pattern})\b", line)
    ]


@pytest.mark.parametrize(("found", "allowed"), [(in_product, ALLOWED), (in_texts, PHRASES_ALLOWED)])
def test_the_old_vocabulary_is_refused(found, allowed):
    sentences = found()
    assert len(sentences) <= allowed, "\n" + "\n".join(sentences)


def test_an_old_name_is_found():
    """In any spelling, and as a part; a word that only contains it is left alone."""
    text = "class RunTold: pass\nTOLD_AT = 1\ndef f(_told_of): retold, hardware_word = 1, 2\n"
    found = refused(Module("supervise.runtime.x", "runtime/x.py", text))
    assert found == [
        ("RunTold", "told"),
        ("TOLD_AT", "told"),
        ("_told_of", "told"),
        ("hardware_word", "word"),
    ]
