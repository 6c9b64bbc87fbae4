"""What a person is told before a run; nothing here starts their job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def doctor(supervise):
    """A function that returns `(exit code, checks by name, the whole document)`."""

    def call(*argv: object) -> tuple[int, dict[str, tuple[str, str]], dict]:
        code, out, _ = supervise("doctor", "--json", *argv)
        found = json.loads(out)
        return code, {c["name"]: (c["status"], c["detail"]) for c in found["checks"]}, found

    return call


def test_a_sound_machine_is_called_sound(doctor, tmp_path):
    """Nothing fails; every check says what it found, not only that it did."""
    code, checks, found = doctor("--run-dir", tmp_path / "deep" / "runs")

    assert code == 0
    assert found["ok"]
    assert checks["shared memory"][0] == "ok"
    assert checks["run directory"] == ("ok", f"{tmp_path / 'deep' / 'runs'} can be written")
    assert "nano" in checks["policies"][1]


def test_it_says_where_it_cannot_write(doctor, monkeypatch):
    """The two places that a run cannot do without, each with the system's own reason."""
    monkeypatch.setenv("SUPERVISE_SHM", "/proc/nowhere")
    code, checks, _ = doctor("--run-dir", "/proc/runs")

    assert code == 1
    assert checks["run directory"][0] == "fail"
    assert checks["run directory"][1].startswith("cannot write in /proc: ")
    assert checks["shared memory"][0] == "fail"


def test_a_person_gets_a_line_per_check(supervise):
    """The same as the JSON document, and what to try next."""
    code, text, _ = supervise("doctor")

    assert code == 0
    assert "\nok    shared memory  /dev/shm: " in text
    assert "supervise doctor -- COMMAND looks into a job's own Python too" in text


def test_a_command_that_is_not_there_is_a_failure(doctor):
    """As `run` would end with 127."""
    code, checks, found = doctor("--", "no-such-program", "x")

    assert code == 1
    assert checks["command"] == ("fail", "no-such-program: command not found")
    assert set(found["metrics"].values()) == {"no: the command cannot be started"}


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ((sys.executable, "-I", "train.py"), "python -I ignores PYTHONPATH"),
        (("/bin/ls",), "ls is not Python"),
    ],
)
def test_no_probe_possible_is_no_failure_but_is_said(doctor, argv, reason):
    """Tier T0 still has exit codes, signals and a record; each metric says why it is missing."""
    code, checks, found = doctor("--", *argv)

    assert code == 0
    assert found["tier"] == "T0"
    assert checks["command"] == ("note", f"tier T0, no probe: {reason}")
    assert set(found["metrics"].values()) == {f"no: {reason}"}


def test_a_python_without_torch_is_told_from_one_that_is_broken(doctor):
    """The interpreter is tried, so what it lacks is known before the job starts."""
    python = Path(sys.base_prefix) / "bin" / "python3"
    if not subprocess.run([python, "-c", "import torch"], capture_output=True).returncode:
        pytest.skip(f"{python} has torch")
    code, checks, found = doctor("--", python, "train.py")

    assert code == 0
    assert checks["torch"] == ("note", "not there; a job without it is seen from outside only")
    assert set(found["metrics"].values()) == {"no: there is no torch"}


def test_a_program_that_is_not_python_after_all_is_said(doctor, tmp_path):
    """A name is a promise that may not be kept."""
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\necho 'no such option' >&2\nexit 3\n")
    fake.chmod(0o755)
    code, checks, _ = doctor("--", fake, "train.py")

    assert code == 1
    assert checks["python"] == ("fail", "no such option")


@pytest.mark.slow
def test_what_it_promises_is_what_arrived(doctor):
    """Four real steps with the probe in the job's own Python; all that was measured is named."""
    code, checks, found = doctor("--", sys.executable, "train.py")

    assert code == 0, checks
    assert checks["probe"][0] == "ok"
    assert checks["rollback"] == ("ok", "ready, for a training loop that is a `while`")
    certain = {name for name, answer in found["metrics"].items() if answer == "yes"}
    assert {"train_loss_raw", "grad_global_norm", "learning_rate", "update_to_weight"} <= certain
    assert found["metrics"]["loss_scale"] == "only under a torch.amp.GradScaler"
    assert not [a for a in found["metrics"].values() if a.startswith("no:")]
