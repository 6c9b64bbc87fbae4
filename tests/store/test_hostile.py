"""Files that no writer leaves: holes of gigabytes, endless lines, tails of every kind.

Each case runs in a process that may take 300 MB more than it has: to read a file whole ends it.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from supervise.core.model import Frame
from supervise.store import Journal

HOLE = 6 << 30
BEGIN = f"""
import resource, sys
from pathlib import Path
from supervise.errors import StoreError
from supervise.checkpoints import Register
from supervise.store import Audit, Journal, RunDir, read_journal, verify_audit
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (300 << 20),) * 2)
path, HOLE = Path(sys.argv[1]), {HOLE}
def told(call):
    try:
        return repr(call())
    except StoreError as error:
        return f"{{error}} | {{error.hint}}"
"""


def say(path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_journal_that_ends_in_a_hole_is_torn_there(run):
    """6 GB of nothing are skipped; the next writer cuts them off."""
    journal = Journal.open(run.journal_path)
    for step in range(9):
        journal.append(Frame(step, 0, 0, step, (1.0, 2.0)))
    journal.close()
    path = run.journal_path / "00000.jrn"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(HOLE)

    out = say(
        run.path,
        "print(len(list(read_journal(path / 'journal'))))\n"
        "print(len(Journal.open(path / 'journal')))",
    )

    assert out.split() == ["9", "9"]
    assert path.stat().st_size == size


@pytest.mark.parametrize(("ending", "status"), [(b"", "truncated"), (b"\n{}\n", "tampered")])
def test_an_endless_line_in_the_log_takes_no_memory(run, opened, put, ending, status):
    """One line of 6 GB: without its end it is a torn tail, of which the next writer keeps 1 MB."""
    log = opened(run.audit_path, run.id)
    put(log)
    log.close()
    size = run.audit_path.stat().st_size
    with run.audit_path.open("r+b") as file:
        file.seek(size)
        file.write(b"x" * 5000)
        file.truncate(HOLE)
        file.seek(HOLE)
        file.write(ending)

    out = say(
        run.path,
        "log = path / 'audit.log'\n"
        "print(verify_audit(log).status)\n"
        "print(told(lambda: Audit.open(log, RunDir.open(path).id, at_ns=1,\n"
        "                              wall='now').close()))\n",
    )

    assert out.splitlines()[0] == status
    if status == "truncated":
        (torn,) = run.path.glob("audit.log.truncated-*")
        assert torn.read_bytes().startswith(b"x" * 5000)
        assert torn.stat().st_size <= 1 << 20
    else:
        assert "audit record 1 (byte" in out


@pytest.mark.parametrize("name", ["run.json", "checkpoints.json"])
def test_a_document_that_is_a_hole_is_named(run, name):
    with (run.path / name).open("ab") as file:
        file.truncate(HOLE)
    calls = {"run.json": "RunDir.open(path)", "checkpoints.json": "Register(path)"}

    out = say(run.path, f"print(told(lambda: {calls[name]}))")

    assert str(run.path / name) in out
