"""The README as a newcomer reads it: its commands run, and its policy is what `init` writes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
POLICY = re.search(r"^```yaml supervise.yaml\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^supervise (.+?)(?: +#.*)?$", re.MULTILINE)
ANSWERS = {"release": 1}  # nothing is held

JOB = """\
import argparse, os, time, torch
parser = argparse.ArgumentParser()
parser.add_argument("--resume")
args = parser.parse_args()
torch.manual_seed(0)
torch.set_num_threads(1)
model, target = torch.nn.Linear(16, 8), torch.nn.Linear(16, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
start = 0
if args.resume:
    state = torch.load(args.resume)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["step"]
os.makedirs("out", exist_ok=True)
for step in range(start, 300):
    x = torch.randn(32, 16)
    loss = torch.nn.functional.mse_loss(model(x), target(x).detach())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 49:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, f"out/step-{step + 1}.pt")
    time.sleep(0.03 if 140 < step < 200 else 0.003)
    while step == 249 and not os.path.exists("finish"):
        time.sleep(0.05)
"""


def test_the_two_commands_and_those_of_a_page_do_what_the_readme_shows(supervise, tmp_path):
    """`init` writes the policy of the README; under it a spike is rolled back, and each command of
    a paged person is answered by the run."""
    (tmp_path / "train.py").write_text(JOB)
    job = [sys.executable, "train.py"]
    commands = [shlex.split(line) for line in COMMAND.findall(README)]
    (_, start), answers = commands[:2], commands[2:]
    assert commands[0] == ["init", "--", "python", "train.py"]
    assert start == ["--policy", "supervise.yaml", "--", "python", "train.py"]

    assert supervise("init", "--", *job).returncode == 0
    written = (tmp_path / "supervise.yaml").read_text()
    schema, _, rest = written.partition("\n")
    assert Path(schema.partition("$schema=")[2]).is_file()
    assert POLICY is not None and rest.startswith(POLICY[1])
    running = supervise.start(*start[:2], "--run-dir", "RUN", "--drill", "lr_spike@150", "--", *job)
    run = supervise.run_of("RUN")
    wait_until(lambda: run.state.get("state") == "probation", "the spike rolled back")
    for command in answers:
        done = supervise(*command)
        assert done.returncode == ANSWERS.get(command[0], 0), (command, done.stderr)
    (tmp_path / "finish").touch()
    out, err = running.communicate(timeout=120)

    assert running.returncode == 0, out + err
    assert run.actions.count("rollback") == 2  # that of the policy, and that by hand
    run.prove()


def test_a_reader_is_through_the_readme_in_minutes():
    assert len(README.split()) <= 900


def test_the_picture_is_drawn_from_the_recorded_losses(tmp_path):
    root = Path(__file__).parents[2]
    script = f"""
import sys; sys.path.insert(0, {str(root / "docs")!r})
import pathlib, curve
curve.PICTURE = pathlib.Path({str(tmp_path / "curve.svg")!r})
curve.draw()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    committed = (root / "docs" / "curve.svg").read_text()
    paths = re.compile(r'<path d="([^"]+)"')
    assert paths.findall((tmp_path / "curve.svg").read_text()) == paths.findall(committed)
