"""`supervise init`: the policy of a job in a few lines."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from supervise.catalog import load_policy
from tests.support.recorded_run import shipped_policy

NANO = Path(__file__).parents[2] / "examples" / "nano" / "train.py"
TRAINER = "from transformers import Trainer\nTrainer(model).train()"
OUT_OF_A_LINE = "# How this job resumes is not known, so that nothing starts it again."


@pytest.mark.parametrize(
    ("script", "argv", "job"),
    [
        (NANO.read_text(), "python t.py", {"resume": "args", "args": ("--resume={checkpoint}",)}),
        (TRAINER, "python t.py", {"resume": "library", "args": ()}),
        ("", "litgpt pretrain x", {"resume": "args", "args": ("--resume={checkpoint}",)}),
        ("import torch", "python t.py", None),
        ("", "litgpt finetune_lora x", None),
    ],
)
def test_the_policy_loads_with_and_without_its_comments(supervise, commands, script, argv, job):
    path = commands / "supervise.yaml"
    (commands / "t.py").write_text(script)
    supervise("init", "--", *argv.split())
    written = path.read_text().splitlines()
    policy = load_policy(path)

    assert (policy.name, policy.mode) == ("supervise", "enforce")
    assert policy.job.on_crash == ("restart" if job else None)
    (stuck,) = (rule for rule in policy.rules if rule.id == "hang.stuck")
    assert stuck.runbook == ("restart-if-stuck" if job else "stop-and-page")
    found = policy.job.relaunch
    assert ({} if found is None else {"resume": found.resume, "args": found.args}) == (job or {})
    assert [rule.id for rule in policy.rules] == [rule.id for rule in shipped_policy("nano").rules]
    assert Path(written.pop(0).partition("# yaml-language-server: $schema=")[2]).is_file()
    awake = [re.sub(r"^( *)# ", r"\1", line) for line in written]
    assert (OUT_OF_A_LINE in " ".join(written)) == (job is None)
    path.write_text("\n".join(line for line in awake if not line.startswith("How")) + "\n")
    policy = load_policy(path)
    assert "slack" in policy.notify and policy.job.relaunch


@pytest.mark.parametrize("base", ["medium", "observe"])
def test_a_crash_is_answered_where_the_policy_has_a_budget_for_it(supervise, commands, base):
    (commands / "t.py").write_text(TRAINER)
    _, out, _ = supervise("init", "--json", "--policy", base, "--", "python", "t.py")
    policy, shipped = load_policy(commands / "supervise.yaml"), shipped_policy(base)

    assert bool(policy.job.on_crash) == ("restart" in shipped.budgets)
    assert policy.mode == shipped.mode and policy.job.relaunch
    assert json.loads(out)["next"] == "supervise --policy supervise.yaml -- python t.py"
    assert [rule.id for rule in policy.rules] == [rule.id for rule in shipped.rules]


def test_a_file_is_never_overwritten(supervise, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("supervise.yaml").write_text("mine")
    code, _, err = supervise("init", "--", sys.executable, "t.py")

    assert (code, Path("supervise.yaml").read_text()) == (64, "mine")
    assert "supervise.yaml exists, and is left as it is" in err
    code, _, err = supervise("init", "-p", "mediun", "--out", "o", "--", sys.executable, "t.py")
    assert code == 64 and "did you mean 'medium'?" in err and not Path("o").exists()


def test_a_slip_in_the_command_leaves_no_policy(supervise, commands):
    code, out, _ = supervise("init", "--", "python", "trian.py")

    assert code == 1 and "trian.py: no such file" in out and "is not written" in out
    assert not (commands / "supervise.yaml").exists()
