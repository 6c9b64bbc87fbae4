"""Small corpora of words drawn by a seed, and `supervise data check` of them in this process."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from supervise.cli import invoke

SYLLABLES = [consonant + vowel for consonant in "bdklmrst" for vowel in "aeiou"]


class Outcome(NamedTuple):
    """Exit code, the JSON document of the check, stderr."""

    code: int
    document: dict[str, Any]
    errors: str

    @property
    def metrics(self) -> dict[str, float]:
        return self.document["metrics"]

    @property
    def fired(self) -> set[str]:
        found = self.document["findings"]
        return {row["rule"].removeprefix("data_build.") for row in found if row["status"] == "fail"}


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """A function that checks paths, and returns the outcome."""

    def run(*argv: object) -> Outcome:
        code = invoke(["data", "check", *map(str, argv), "--json"])
        caught = capsys.readouterr()
        return Outcome(code, json.loads(caught.out) if code < 2 else {}, caught.err)

    return run


def texts(count: int, seed: int = 0, low: int = 40, high: int = 120) -> list[str]:
    """Return documents of random words, all different."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(2000)]
    return [" ".join(rng.choices(vocabulary, k=rng.randint(low, high))) for _ in range(count)]


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    """Write records as JSON lines; a text becomes a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [{"text": row} if isinstance(row, str) else row for row in rows]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
