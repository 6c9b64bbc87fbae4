"""Whatever is wrong gets one clear message and a documented code; the job's own result is kept."""

from __future__ import annotations

import re
import sys

import pytest

pytestmark = pytest.mark.slow

HELLO = [sys.executable, "-c", "import sys; print('hello'); sys.exit(5)"]
BROKEN = "version: supervise/v1\npolicy: bad\nmode: enforce\nuse: [nonfinit]\nbudgts: {}\n"
REFUSED = [
    ("--policy nano", 64, ["no command given", "supervise --policy nano -- python train.py"]),
    ("--polcy nano -- true", 64, ["--policy"]),
    ("--policy nanoo -- true", 65, [r"\bnano\b"]),
    ("--policy bad.yaml -- true", 65, [r"bad\.yaml:4:.*nonfinite", r"bad\.yaml:5:1:.*budgets"]),
    ("--drill lr_spik@10 -- true", 64, ["lr_spike"]),
    ("--run-dir file/run -- true", 64, ["--run-dir"]),
    ("--run-dir mine -- true", 64, ["not empty"]),
    ("run --resume-run -- true", 64, ["--run-dir"]),
]
# Refused only when the command is started.
NOT_STARTED = [
    ("--run-dir run -- pythn-no-such-command train.py", 127, ["command not found"]),
    ("--run-dir empty -- pythn-no-such-command", 127, ["command not found"]),
]


@pytest.fixture
def home(supervise):
    """A directory with a file, a directory that is not empty, and a broken policy."""
    for name in ("mine", "empty"):
        (supervise.home / name).mkdir()
    for name, text in (("file", ""), ("mine/notes.txt", "mine"), ("bad.yaml", BROKEN)):
        (supervise.home / name).write_text(text)
    return supervise.home


@pytest.mark.parametrize(("line", "code", "parts"), REFUSED + NOT_STARTED)
def test_a_command_line_that_cannot_work_is_refused_and_leaves_nothing(
    supervise, home, line, code, parts
):
    before = sorted(home.rglob("*"))
    call = supervise.process if (line, code, parts) in NOT_STARTED else supervise
    done = call(*line.split())

    assert done.returncode == code, done.stderr
    for part in parts:
        assert re.search(part, done.stderr), done.stderr
    assert sorted(path for path in home.rglob("*") if "state" not in path.parts) == before


@pytest.mark.parametrize(
    ("job", "code", "output", "reason"),
    [
        (["sh", "-c", "echo hello; exit 7"], 7, "hello\n", "no step was seen"),
        ([sys.executable, "-I", *HELLO[1:]], 5, "hello\n", "python -I ignores PYTHONPATH"),
        (HELLO, 5, "hello\n", "has not imported torch"),
        ([sys.executable, "-c", "import torch; raise SystemExit(9)"], 9, "", "no optimizer step"),
    ],
)
def test_a_job_without_a_probe_is_watched_from_outside(supervise, job, code, output, reason):
    run = supervise.run(job=job)

    assert (run.returncode, run.stdout) == (code, output)
    assert run.stderr.count("no step was seen") == 1
    assert reason in run.stderr
    assert run.state["tier"] == "T0"


def test_a_disabled_probe_is_reported(supervise):
    supervise.env["SUPERVISE_DISABLE"] = "1"
    code = "import os; print(os.environ['PYTHONPATH'])"
    run = supervise.run(job=[sys.executable, "-c", code])

    assert run.stdout.strip() == supervise.env["PYTHONPATH"]
    assert "SUPERVISE_DISABLE is set" in run.stderr
