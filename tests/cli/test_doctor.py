"""What a person is told before a run; only `--wiring` starts their job."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from supervise.catalog import measured_metrics
from supervise.cli._job_check import ProbeCheck, list_metric_availability, world_size
from tests.support.supervised_run import FAST_TORCH


@pytest.fixture
def doctor(supervise):
    """A function that returns `(exit code, checks by name, the whole document)`."""

    def call(*argv: object) -> tuple[int, dict[str, tuple[str, str]], dict]:
        code, out, _ = supervise("doctor", "--json", *argv)
        found = json.loads(out)
        return code, {c["name"]: (c["status"], c["detail"]) for c in found["checks"]}, found

    return call


def test_a_sound_machine_is_called_sound(doctor, tmp_path):
    code, checks, found = doctor("--run-dir", tmp_path / "deep" / "runs")

    assert code == 0
    assert found["ok"]
    assert checks["shared memory"][0] == "ok"
    assert checks["run directory"] == ("ok", f"{tmp_path / 'deep' / 'runs'} is writable")
    assert "nano" in checks["policies"][1]
    assert checks["supervise"][1].startswith("0.")
    assert checks["formats"] == ("ok", "policy supervise/v1, probe 1, run directory 1")


def test_it_says_where_it_cannot_write(doctor, monkeypatch):
    monkeypatch.setenv("SUPERVISE_SHM", "/proc/nowhere")
    code, checks, _ = doctor("--run-dir", "/proc/runs")

    assert code == 1
    assert checks["run directory"][0] == "fail"
    assert checks["run directory"][1].startswith("cannot write in /proc: ")
    assert checks["shared memory"][0] == "fail"


@pytest.mark.parametrize(
    ("argv", "code", "reason"),
    [
        ((sys.executable, "-I", "train.py"), 0, "python -I ignores PYTHONPATH"),
        (("/bin/ls",), 0, "ls is not Python"),
        (("no-such-program", "x"), 1, "the command cannot be started"),
    ],
)
def test_no_probe_possible_is_no_failure_but_is_said(doctor, argv, code, reason):
    ended, checks, found = doctor("--", *argv)

    command = ("note", f"no probe: {reason}")
    missing = ("fail", "no-such-program: command not found")
    assert (ended, found["tier"]) == (code, "T1" if code else "T0")
    assert checks["command"] == (missing if code else command)
    assert set(found["metrics"].values()) == {f"no: {reason}"}


@pytest.mark.slow
def test_a_python_without_torch_is_told_from_one_that_is_broken(doctor):
    python = Path(sys.base_prefix) / "bin" / "python3"
    if not subprocess.run([python, "-c", "import torch"], capture_output=True).returncode:
        pytest.skip(f"{python} has torch")
    code, checks, found = doctor("--", python, __file__)

    assert code == 0
    watched = "only exit, output and signals are watched"
    assert checks["torch"] == ("note", f"not installed; without torch {watched}")
    assert set(found["metrics"].values()) == {"no: there is no torch"}


def test_a_program_that_is_not_python_after_all_is_said(doctor, commands):
    code, checks, _ = doctor("--", "python", "package")

    assert code == 1
    assert checks["python"] == ("fail", "no such option")


@pytest.mark.slow
def test_what_it_promises_is_what_arrived(doctor, supervise, tmp_path):
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
    assert answers["microbench_score"].startswith("only with job.evaluate")
    assert answers["disk_free"] == "yes, every 2 s"
    assert answers["checkpoint_ok"].startswith("only where the job saves checkpoints")
    assert answers["restart_rate"] == "only once it was started again"
    assert answers["clip_bound"] == "only while `clip` is active"
    listed = json.loads(supervise("metrics", "list", "--json")[1])
    assert set(answers) == {row["id"] for row in listed}


def test_what_did_not_arrive_has_its_reason():
    arrived = ["3.11.0", "2.0.0", "trained"]
    status = {"collectors": {"timing": "off: ValueError: x", "loss": "on"}}
    tried = ProbeCheck(arrived, "", True, ("step_time",), [], status)
    ranks, answers = {}, {}
    for world in (8, None, 1):
        available = list_metric_availability(tried, None, world)
        answers = {name: str(answer) for name, answer in available.items()}
        ranks[world] = answers["straggler_ratio"]

    assert answers["input_time"] == "no: its collector is off: ValueError: x"
    assert answers["train_loss_raw"] == "no: it did not arrive in the check"
    assert answers["step_time"] == "yes"
    assert answers["epoch"] == "only under Trainer of transformers or Lightning"
    assert ranks == {1: "no: one rank", 8: "yes: of all ranks", None: "only with several ranks"}


@pytest.mark.slow
def test_a_trial_that_broke_off_is_no_success(doctor, tmp_path, monkeypatch):
    """A Python that trains, and fails at the end of the script."""
    monkeypatch.setenv("PYTHONPATH", FAST_TORCH)
    python = tmp_path / "python3"
    broken = "sys.argv[2].replace('print(\"trained\"', '1 / 0; print(\"trained\"')"
    python.write_text(f"#!{sys.executable}\nimport sys\nexec({broken})\n")
    python.chmod(0o755)
    code, checks, _ = doctor("--", python, __file__)

    ended = "training ended early: ZeroDivisionError: division by zero"
    assert (code, checks["probe"]) == (1, ("fail", ended))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("python -u train.py --config x.py", "train.py: no such file"),
        ("python3.11 -m torch.distributed.run --nproc-per-node 2 train.py", "train.py: no such"),
        ("python -m tool out.py", "none seen"),
        ("python -m package.train out.py", "saved at train.py:"),
        ("python -u -m package", "saved at __main__.py:"),
        ("accelerate launch --module package.train x.py", "saved at train.py:"),
        ("python -c pass out.py", "none seen"),
        ("ssh there python train.py", "none seen"),
        ("python", "none seen"),
    ],
)
def test_only_a_script_that_is_to_be_here_is_looked_for(doctor, commands, line, said):
    for name in ("train", "__main__"):
        (commands / "package" / f"{name}.py").write_text("torch.save(model, path)\n")
    checks = doctor("--", *line.split())[1]

    assert said in (checks["command"] if "no such" in said else checks["checkpoints"])[1]


@pytest.mark.parametrize(
    ("line", "environ", "ranks"),
    [
        ("python train.py -n 4", {}, 1),
        ("torchrun train.py", {}, None),
        ("torchrun --nproc_per_node=auto train.py", {}, None),
        ("torchrun --nnodes 2 --nproc-per-node 8 train.py", {}, None),
        ("python -m torch.distributed.run --nproc-per-node=4 train.py --n 2", {}, 4),
        ("accelerate launch --num_processes 2 train.py", {}, 2),
        ("torchrun --nproc-per-node 2 -m package.train --nproc-per-node 3", {}, 2),
        ("mpirun -np 16 python train.py", {}, 16),
        ("python train.py", {"SLURM_NTASKS": "32"}, 32),
    ],
)
def test_how_many_ranks_a_command_starts(line, environ, ranks):
    assert world_size(line.split(), environ) == ranks


PROGRAMS = Path(__file__).parents[2] / "benchmarks" / "proving" / "programs"
NANO = Path(__file__).parents[2] / "examples" / "nano" / "train.py"
ACCELERATE = """\
from accelerate import Accelerator
parser.add_argument("--resume_from_checkpoint", type=str)
Accelerator().load_state(parser.parse_args().resume_from_checkpoint)
Accelerator().save_state(out)
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
def test_a_script_is_read_for_its_checkpoints(doctor, commands, script, checkpoints):
    if isinstance(script, str):
        (commands / "t.py").write_text(script)
        script = "t.py"
    assert checkpoints in doctor("--", "python", script)[1]["checkpoints"][1]


JOB = """
import torch
body, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
model = torch.nn.Sequential(body, head)
adam = torch.optim.Adam(body.parameters())
for step in range(10**6):
    adam.zero_grad()
    (model(torch.randn(8, 4)).pow(2).mean() * float("nan")).backward()
    adam.step()
"""


@pytest.mark.slow  # it starts a job, which would never end by itself
def test_wiring_and_losses_are_looked_at_in_the_first_steps_of_the_job(
    doctor, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", FAST_TORCH)
    script = tmp_path / "train.py"
    script.write_text(JOB)
    code, checks, _ = doctor("--wiring", "--", sys.executable, script)

    assert (code, checks["wiring"][0], checks["loss"][0]) == (1, "fail", "fail")
    assert "1.weight, 1.bias" in checks["wiring"][1]
    nan = r"NaN or Inf in (\d+) of \1 steps, first in step 0"
    assert re.fullmatch(nan, checks["loss"][1])


@pytest.mark.slow
def test_a_command_that_is_none_is_named_once(supervise):
    code, _, err = supervise("doctor", "--wiring", "--", "no-such-program")

    assert code == 64
    assert err.count("supervise: ") == 1 and "'no-such-program': command not found" in err
