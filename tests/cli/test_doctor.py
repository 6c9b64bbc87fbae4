"""What a person is told before a run; nothing here starts their job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from supervise.catalog import all_metrics, measured_metrics
from supervise.cli._job_check import (
    SUPERVISOR_METRICS,
    ProbeCheck,
    availability,
    look_at,
    script_of,
    world_size,
)
from supervise.cli.doctor import probe_checks


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
    assert checks["run directory"] == ("ok", f"{tmp_path / 'deep' / 'runs'} is writable")
    assert "nano" in checks["policies"][1]


def test_it_says_where_it_cannot_write(doctor, monkeypatch):
    """The two places that a run cannot do without, each with the system's own reason."""
    monkeypatch.setenv("SUPERVISE_SHM", "/proc/nowhere")
    code, checks, _ = doctor("--run-dir", "/proc/runs")

    assert code == 1
    assert checks["run directory"][0] == "fail"
    assert checks["run directory"][1].startswith("cannot write in /proc: ")
    assert checks["shared memory"][0] == "fail"


def test_a_command_that_is_not_there_is_a_failure(doctor):
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
    code, checks, found = doctor("--", python, __file__)

    assert code == 0
    assert checks["torch"] == (
        "note",
        "not installed; without torch only exit, output and signals are watched",
    )
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
def test_what_it_promises_is_what_arrived(doctor, tmp_path):
    """Real steps with the probe in the job's own Python; the script itself is not there."""
    code, checks, found = doctor("--", sys.executable, tmp_path / "nofile.py")
    answers, seen = found["metrics"], set(found["seen"])

    assert (code, checks["command"][0]) == (1, "fail")
    assert checks["command"][1].startswith(f"{tmp_path / 'nofile.py'}: no such file")
    assert checks["probe"][0] == "ok"
    assert checks["rollback"][0] == "ok"
    assert checks["rollback"][1].startswith("ready in mode enforce")
    assert float(checks["cost"][1].split()[0]) == pytest.approx(1e6 * found["probe_s"], abs=1)
    certain = {name for name, answer in answers.items() if answer.startswith("yes")}
    assert {"train_loss_raw", "grad_global_norm", "learning_rate", "update_to_weight"} <= certain
    assert certain & set(measured_metrics()) <= seen
    assert {"mfu", "input_time", "max_attn_logit", "moe_util_entropy", "residual_rms"} <= seen
    assert answers["loss_scale"] == "only under a torch.amp.GradScaler"
    assert answers["max_attn_logit"].startswith("every 50 steps, only where attention is")
    assert answers["loss_dispersion"] == answers["grad_sketch.<i>"] == "no: one rank"
    assert answers["val_loss"].startswith("only where Trainer or Lightning evaluates")
    assert answers["microbench_score"] == "only where the job reports it"
    assert answers["disk_free"] == "yes, every 2 s"
    assert answers["checkpoint_ok"].startswith("only where the job saves checkpoints")
    assert answers["restart_rate"] == "only once it was started again"
    assert answers["clip_bound"] == "only while `clip` is active"
    assert set(answers) == {*all_metrics(), *SUPERVISOR_METRICS}


def good_check(*names, **status):
    """A probe check that went well."""
    return ProbeCheck(["3.11.0", "2.0.0", "trained"], "", True, names, [], status)


def test_a_collector_that_went_off_is_the_reason():
    """What should have come and did not is no condition of the job."""
    tried = good_check("step_time", collectors={"timing": "off: ValueError: x", "loss": "on"})
    answers = availability(tried, None, 1)

    assert answers["input_time"] == "no: its collector is off: ValueError: x"
    assert answers["train_loss_raw"] == "no: it did not arrive in the check"
    assert answers["step_time"] == "yes"
    assert answers["epoch"] == "only under Trainer of transformers or Lightning"


def test_what_needs_several_ranks_follows_the_command():
    assert availability(good_check("step_time"), None, 1)["straggler_ratio"] == "no: one rank"
    assert availability(good_check("step_time"), None, 8)["straggler_ratio"] == "yes: of all ranks"
    assert (
        availability(good_check("step_time"), None, None)["straggler_ratio"]
        == "only with several ranks"
    )


@pytest.mark.parametrize(
    ("line", "script"),
    [
        ("python -u train.py --config x.py", "train.py"),
        ("python3.11 -m torch.distributed.run --nproc-per-node 2 train.py", "train.py"),
        ("torchrun --nproc-per-node 2 train.py", "train.py"),
        ("python -W error -X dev train.py", "train.py"),
        ("python -m tool out.py", None),
        ("python -m package.train out.py", "package/train.py"),
        ("python -u -m package", "package/__main__.py"),
        ("torchrun --nproc-per-node 2 -m package.train", "package/train.py"),
        ("accelerate launch --module package.train x.py", "package/train.py"),
        ("python -c pass out.py", None),
        ("ssh there python train.py", None),
        ("python", None),
    ],
)
def test_only_a_script_that_is_to_be_here_is_looked_for(line, script, tmp_path, monkeypatch):
    """What is an argument of something else may be made later, or elsewhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").touch()
    (tmp_path / "package" / "__main__.py").touch()
    assert script_of(tuple(line.split())) == script


def test_a_trial_that_broke_off_is_no_success():
    broken = good_check("step_time")
    broken.lines, broken.error = broken.lines[:2], "RuntimeError: out of luck"
    checks = {check.name: check for check in probe_checks(broken, 1)}

    assert checks["probe"].status == "fail"
    assert checks["probe"].detail == "training ended early: RuntimeError: out of luck"


@pytest.mark.parametrize(
    ("line", "environ", "ranks"),
    [
        ("python train.py -n 4", {}, 1),
        ("torchrun train.py", {}, None),
        ("torchrun --nproc-per-node 8 train.py --n 2", {}, 8),
        ("torchrun --nproc_per_node=auto train.py", {}, None),
        ("torchrun --nnodes 2 --nproc-per-node 8 train.py", {}, None),
        ("python -m torch.distributed.run --nproc-per-node=4 train.py", {}, 4),
        ("accelerate launch --num_processes 2 train.py", {}, 2),
        ("torchrun --nproc-per-node 2 -m package.train --nproc-per-node 3", {}, 2),
        ("mpirun -np 16 python train.py", {}, 16),
        ("python train.py", {"WORLD_SIZE": "4"}, 4),
        ("python train.py", {"SLURM_NTASKS": "32"}, 32),
    ],
)
def test_how_many_ranks_a_command_starts(line, environ, ranks):
    """As far as it tells; what stands behind the script is the script's."""
    assert world_size(line.split(), environ) == ranks


PROGRAMS = Path(__file__).parents[2] / "benchmarks" / "proving" / "programs"
NANO = Path(__file__).parents[2] / "examples" / "nano" / "train.py"
ACCELERATE = """\
from accelerate import Accelerator
parser.add_argument("--resume_from_checkpoint", type=str)
accelerator = Accelerator()
accelerator.load_state(parser.parse_args().resume_from_checkpoint)
def main():
    for epoch in range(3):
        for batch in loader:
            accelerator.backward(model(batch).loss)
            optimizer.step()
            lr_scheduler.step()
        accelerator.save_state(out)
"""


@pytest.mark.parametrize(
    ("script", "checkpoints"),
    [
        (PROGRAMS / "byte_gpt.py", "saved at byte_gpt.py:"),
        (PROGRAMS / "hf_trainer.py", "Trainer: resumes from what"),
        (PROGRAMS / "lightning_fit.py", "Lightning: resumes from"),
        (PROGRAMS / "gan.py", "none seen; nothing says how"),
        (NANO, "resumes by --resume={checkpoint}"),
        (ACCELERATE, "accelerate: resumes by --resume_from_check"),
        ("import mine\nmine.train()", "none"),
        ("def (:", "none seen"),
    ],
)
def test_a_script_is_read_for_its_checkpoints(tmp_path, script, checkpoints):
    if isinstance(script, str):
        (tmp_path / "t.py").write_text(script)
        script = tmp_path / "t.py"
    facts = look_at(str(script), ["python", str(script)])

    assert checkpoints in facts.checkpoints()[1]
