"""What must not be in any file that is published, and what tests do not look at."""

from __future__ import annotations

import ast
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
    "a line that the formatter may not lay out": r"#\s*fmt: *(skip|off)",
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
    places = [where for where, line in lines() if re.search(FORBIDDEN[what], line)]

    assert not places, "".join(f"\n{where} holds {what}" for where in places)


def test_nothing_big_or_built_is_published():
    """Recordings are small; a wheel, a run directory or a checkpoint got in by accident."""
    big = [name for name in published() if (ROOT / name).stat().st_size > 1_000_000]
    built = [name for name in published() if re.search(r"\.(whl|pyc|pt|so)$|^runs/", name)]

    assert big == []
    assert built == []


READMES = ("*.md", "*/README.md", "*/DECISIONS.md", "docs/*.md")


@pytest.mark.parametrize(
    "name", sorted(p.relative_to(ROOT).as_posix() for g in READMES for p in ROOT.glob(g))
)
def test_a_readme_fits_a_terminal(name):
    """No line of prose is wider than 100 columns; a table row, or what a program prints, may be."""
    wide, fenced = [], False
    for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
        fenced ^= line.startswith("```")
        if len(line) > 100 and not fenced and not line.startswith("|"):
            wide.append(f"{name}:{number}")
    assert wide == []


STANDARD = frozenset(("_exit", "_getframe", "_replace", "_make", "_asdict", "_run_exitfuncs"))
PRIVATE_READS = 7  # may only fall


def private_reads(text: str) -> list[str]:
    """Return the private names of other objects, or of product modules, that a test reads."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and re.match("_[^_]", node.attr) and node.attr not in STANDARD:
                found.append(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("supervise"):
            helpers = (node.module or "").rpartition(".")[2] in ("cli", "detectors", "notifiers")
            found += [a.name for a in node.names if a.name.startswith("_") and not helpers]
    return found


def test_no_test_reads_more_private_names_of_the_product():
    """A test of internals breaks when the code gets better; test what a caller sees."""
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in private_reads(path.read_text())
    ]
    assert len(found) <= PRIVATE_READS, "\n" + "\n".join(found)


def test_a_private_name_is_found():
    """On another object and by import; not on `self`, and not what the standard library offers."""
    text = "from supervise.runtime.loop import _x\na._b\nself._c\nos._exit(0)\na.__dict__\n"
    assert private_reads(text) == ["_x", "_b"]
