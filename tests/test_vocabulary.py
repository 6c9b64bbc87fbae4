"""Names and messages use the field's terms: the project's old private vocabulary is refused.

`python -m tests.test_vocabulary` prints the allowances that the tree needs now; they may only fall.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_architecture import Module, read_modules, within

GOLDEN = Path(__file__).parent / "golden"

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
# How many names of a package may still hold such a part: distinct names, counted per file.
ALLOWED: dict[str, int] = {
    "supervise.actions": 4,
    "supervise.app": 12,
    "supervise.catalog": 17,
    "supervise.core": 31,
    "supervise.detectors": 1,
    "supervise.inputs": 6,
    "supervise.job": 2,
    "supervise.store": 1,
    "supervise_probe.adapters": 15,
    "supervise_probe.capture": 1,
    "supervise_probe.collectors": 18,
    "supervise_probe.control": 4,
    "supervise_probe.ipc": 10,
    "supervise_probe.listeners": 7,
    "supervise_probe.patches": 4,
    "supervise_probe.probe": 3,
    "supervise_probe.runtime": 3,
    "supervise_probe.sampling": 8,
    "supervise_probe.savepoints": 1,
    "supervise_probe.stepping": 9,
    "supervise_probe.torch_state": 5,
    "supervise_probe.wire": 1,
    "supervise_probe.wiring": 2,
}

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
ALLOWED_PHRASES: dict[str, int] = {"messages.txt": 1}


def names(tree: ast.AST) -> Iterator[str]:
    """Yield every identifier that a module defines or uses."""
    for node in ast.walk(tree):
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


def parts(name: str) -> list[str]:
    """Return the words of an identifier: `_spare_until`, `RunTold`, `TOLD` -> lower case."""
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def refused(module: Module) -> list[tuple[str, str]]:
    """Return `(name, refused part)` for each distinct name of a module, its own name included."""
    found = {*names(module.tree), module.name.rpartition(".")[2]} - ALSO_TORCH
    return [(name, part) for name in sorted(found) for part in parts(name) if part in REFUSED]


def room(module: Module) -> str:
    """Return the package that a module is counted in."""
    return ".".join(module.name.split(".")[:2])


@cache
def in_product() -> dict[str, list[str]]:
    """Return a sentence per refused name, by package."""
    found: dict[str, list[str]] = {}
    for module in read_modules():
        if within(module.name, ("supervise", "supervise_probe", "supervise_offline")):
            found.setdefault(room(module), []).extend(
                f"{module.path}: {name} holds {part!r}; use {REFUSED[part]}"
                for name, part in refused(module)
            )
    return found


def in_texts() -> dict[str, list[str]]:
    """Return a sentence per refused phrase in what people read, by golden file."""
    found: dict[str, list[str]] = {}
    for file in ("messages.txt", "help.txt"):
        found[file] = [
            f"{file}:{number}: {match.group()!r}; use {advice}"
            for number, line in enumerate((GOLDEN / file).read_text().splitlines(), 1)
            for pattern, advice in PHRASES.items()
            for match in re.finditer(pattern, line)
        ]
    return found


@pytest.mark.parametrize("package", sorted({room(m) for m in read_modules()} & set(in_product())))
def test_no_name_is_of_the_old_vocabulary(package):
    """A package may hold as many as it is allowed, and no more."""
    found = in_product()[package]
    assert len(found) <= ALLOWED.get(package, 0), "\n" + "\n".join(found)


@pytest.mark.parametrize("file", ["messages.txt", "help.txt"])
def test_no_message_is_in_the_old_vocabulary(file):
    found = in_texts()[file]
    assert len(found) <= ALLOWED_PHRASES.get(file, 0), "\n" + "\n".join(found)


def test_an_old_name_is_found():
    """In any spelling, and as a part; a word that only contains it is left alone."""
    text = "class RunTold: pass\nTOLD_AT = 1\ndef f(_told_of): retold, hardware_word = 1, 2\n"
    found = refused(Module("supervise.app.x", "app/x.py", text))
    assert found == [
        ("RunTold", "told"),
        ("TOLD_AT", "told"),
        ("_told_of", "told"),
        ("hardware_word", "word"),
    ]


if __name__ == "__main__":
    for title, counted in (("ALLOWED", in_product()), ("ALLOWED_PHRASES", in_texts())):
        counts = Counter({name: len(found) for name, found in counted.items() if found})
        print(f"{title}: dict[str, int] = {dict(sorted(counts.items()))!r}")
