"""What must not be in any file that is published."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FORBIDDEN = {
    "a note to self; finish it or file it": r"\b(TODO|FIXME|XXX|HACK)\b",
    "a path of one machine": r"(?<![\w.:/-])/(work|root)/\w",
    "a package index; leave it to the reader's pip": (
        r"--(extra-)?index-url|PIP_INDEX_URL|find-links|download\.pytorch\.org"
    ),
    "a merge that went wrong": r"^(<{7} |>{7} |={7}$)",
}
OURSELVES = Path(__file__).relative_to(ROOT).as_posix()


@cache
def published() -> list[str]:
    """Return the paths of all files that git keeps or would add."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    return [name for name in names if name != OURSELVES]


@cache
def lines() -> list[tuple[str, str]]:
    """Return every line of every text file with its `path:line`."""
    found = []
    for name in published():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a recording
        found += [(f"{name}:{n}", line) for n, line in enumerate(text.splitlines(), 1)]
    return found


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what):
    """One sentence per place."""
    places = [where for where, line in lines() if re.search(FORBIDDEN[what], line)]

    assert not places, "".join(f"\n{where} holds {what}" for where in places)


def test_nothing_big_or_built_is_published():
    """Recordings are small; a wheel, a run directory or a checkpoint got in by accident."""
    big = [name for name in published() if (ROOT / name).stat().st_size > 1_000_000]
    built = [name for name in published() if re.search(r"\.(whl|pyc|pt|so)$|^runs/", name)]

    assert big == []
    assert built == []
