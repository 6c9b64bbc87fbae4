"""What must not be in any file that is published, and the form of documents."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.test_architecture import ROOT

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
def texts() -> dict[str, str]:
    by_name = {}
    for name in published():
        try:
            by_name[name] = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a recording
    return by_name


def matches(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield `path:line` and text of all that matches a pattern, which is of one line."""
    for name, text in texts().items():
        for match in re.finditer(pattern, text, re.MULTILINE):
            yield f"{name}:{text.count(chr(10), 0, match.start()) + 1}", match.group()


@pytest.mark.parametrize("reason", FORBIDDEN)
def test_no_file_holds(reason):
    places = [where for where, _ in matches(FORBIDDEN[reason])]

    assert not places, "".join(f"\n{where} holds {reason}" for where in places)


def test_nothing_big_or_built_is_published():
    """Recordings are small; a wheel, a run directory or a checkpoint got in by accident."""
    big = [name for name in published() if (ROOT / name).stat().st_size > 1_000_000]
    built = [name for name in published() if re.search(r"\.(whl|pyc|pt|so)$|^runs/", name)]

    assert big == []
    assert built == []


DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "[!.]*/*.md")
    for path in ROOT.glob(pattern)
)
PRINTED = re.compile(r"benchmarks/(?!README)")  # tables, written by their scripts


def test_prose_is_at_most_100_columns_wide():
    """A row of a table, or what a program prints, may be wider."""
    wide = []
    for name in (name for name in DOCUMENTS if not PRINTED.match(name)):
        fenced = False
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            fenced ^= line.startswith("```")
            if len(line) > 100 and not fenced and not line.startswith("|"):
                wide.append(f"{name}:{number}")
    assert wide == []


def test_the_architecture_is_read_in_ten_minutes():
    """Behaviour belongs into docs/behaviour.md, reasons into DECISIONS.md."""
    assert (ROOT / "supervisor/README.md").stat().st_size <= 8192


DECISIONS = "supervisor/DECISIONS.md"
RECORD = re.compile(r"^### (D\d+)\. .* \(\d{4}-\d\d-\d\d\)$")


def decision_records() -> dict[str, list[str]]:
    records: dict[str, list[str]] = {}
    body: list[str] = []
    for line in (ROOT / DECISIONS).read_text().splitlines():
        if line.startswith("#"):
            heading = RECORD.match(line)
            assert heading or not line.startswith("###"), f"no number, title and date: {line}"
            body = records.setdefault(heading[1], []) if heading else []
            assert not body, f"two records have one number: {line}"
        elif line:
            body.append(line)
    return records


def test_every_cited_decision_exists():
    """A number that leads nowhere is worse than the reason written at the place."""
    records = decision_records()
    dangling = [
        f"{where} cites {number}"
        for where, number in matches(r"(?<![\w.])D\d{1,3}\b")
        if number not in records and re.search(r"\.(md|py|yaml|toml):", where)
    ]
    assert dangling == []


def test_a_decision_has_ten_lines_at_most():
    long = [number for number, body in decision_records().items() if len(body) > 10]
    assert long == []


LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
NAMED = re.compile(
    r"`(?!RUN/|[\w/]*\bmy_)([\w./-]+/[\w.-]+\.(?:py|md|yaml|json|toml|svg|service|yml))`"
)
IN_TREE = re.compile(
    r"(?<![\w./<-])((?:benchmarks|docs|examples|probes|supervisor)"
    r"/[\w./-]+\.(?:py|md|yaml|json|svg|service|yml|sh))\b"
)


def anchors(document: Path) -> set[str]:
    """Return the anchors of the headings of a Markdown file, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_names_files_that_exist(name):
    """Links are relative to it; names in backquotes also to the root or to one of the packages."""
    text, home = (ROOT / name).read_text(encoding="utf-8"), (ROOT / name).parent
    roots = (home, ROOT, ROOT / "supervisor/supervise", ROOT / "probes/supervise_probe")
    missing = [
        f"{link}#{anchor}"
        for link, anchor in LINK.findall(text)
        if not (target := home / link if link else ROOT / name).exists()
        or (anchor and anchor not in anchors(target))
    ]
    missing += [
        path for path in NAMED.findall(text) if not any((root / path).exists() for root in roots)
    ]
    missing += [path for path in IN_TREE.findall(text) if not (ROOT / path).exists()]
    targets = re.findall(r"^([a-z][\w -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shown = re.findall(r"(?:^|`)make ([a-z][a-z-]*)", text, re.MULTILINE)
    missing += [f"make {name}" for name in shown if name not in " ".join(targets).split()]
    assert missing == []
