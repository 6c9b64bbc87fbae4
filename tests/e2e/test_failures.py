"""A crash through the command line: what people read of it, and what is done about it."""

import json
import sys

import pytest

pytestmark = pytest.mark.slow

POLICY = """\
version: supervise/v1
policy: comes-back
mode: enforce
job: {on_crash: restart, relaunch: {args: [--resume]}, logs: ["kern*.log"]}
budgets: {all: {max: 4, per: 10000}, restart: {max: 2, per: 10000}}
notify: {webhook: {url_env: HOOK, min_sev: SEV1}}
"""
JOB = """\
import os, time
while not os.path.exists("run/state.json"):  # the supervisor reads logs from here on
    time.sleep(0.02)
print("NVRM: Xid (PCI:0000:3b:00): 79", file=open("kernel.log", "w"))
print("step 7: loss=nan", flush=True)
def train():
    for step in range(9):
        step + "one"
train()
"""


def test_a_mistake_is_named_and_not_started_again(supervise, receiver, tmp_path):
    """On console, in the webhook's body, the bundle, `status` and `why`; what the job prints is
    what it is without us, and with --logs it is kept, searched, and in the bundle."""
    url, received = receiver(200)
    supervise.env["HOOK"] = url
    (tmp_path / "p.yaml").write_text(POLICY)
    job = [sys.executable, str(tmp_path / "train.py")]
    (tmp_path / "train.py").write_text(JOB)
    run = supervise.run("--policy", tmp_path / "p.yaml", "--logs", job=job)
    alone = supervise.bare(job)

    text = "TypeError: unsupported operand type(s) for +: 'int' and 'str' at train.py:8"
    assert run.returncode == 78 and run.intents == ["snapshot"]
    assert "the job is DOWN: it ended with code 1 before its first step" in run.stderr
    assert f"supervise:   what  {text}; " in run.stderr
    assert "every start would end the same way (user-error)" in run.stderr
    assert "a GPU or its link reported a fault: NVRM: Xid (PCI:0000:3b:00): 79" in run.stderr
    own = [line for line in run.stderr.splitlines() if not line.startswith("supervise:")]
    assert own[: len(alone.stderr.splitlines())] == alone.stderr.splitlines()
    assert run.stdout == alone.stdout
    kept = (tmp_path / "run/output/output.log").read_text()
    assert sorted(kept.splitlines()) == sorted((alone.stdout + alone.stderr).splitlines())
    assert "a value was not finite: step 7: loss=nan" in run.stderr
    (shown,) = (tmp_path / "run").glob("incidents/*/*/log-*-output.log")
    assert "step 7: loss=nan" in shown.read_text()
    texts = [body["data"]["verdict"] for _, body in received]
    assert any(verdict.startswith(text) for verdict in texts), texts
    (bundle,) = (tmp_path / "run").glob("incidents/*/*/failures.json")
    assert json.loads(bundle.read_text())[0]["cls"] == "user-error"
    assert text in supervise("status", "run").stdout
    assert "    | TypeError: unsupported" in supervise("why", "--full", "run").stdout
    run.prove()
