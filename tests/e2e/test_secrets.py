"""Secrets of a job, in all the places where one can be: none is in what others may read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

JOB = Path(__file__).parent / "jobs" / "talkative.py"
POLICY = """\
version: supervise/v1
policy: told
mode: enforce
detectors: {high: {kind: threshold, metric: train_loss_raw, gt: 20.0}}
rules: [{id: high, when: high, sev: SEV1, run: look}]
runbooks: {look: [snapshot, rollback: {at_least: 5}, verify: {within: 30, clear_for: 5}]}
savepoints: {every: 10, keep: 2}
notify:
  slack: {url_env: PAGER, min_sev: INFO}
  webhook: {url_env: HOOK, secret_env: SIGNED_WITH, min_sev: INFO}
budgets: {all: {max: 8, per: 1000}, rollback: {max: 2, per: 1000}}
warmup: 10
probation: 20
"""


def secret(name: str) -> str:
    return f"s3cr3t{name}Q7w9"


def where(found: Path, texts: list[str]) -> list[str]:
    """Return the places at which any of these secrets stands."""
    return [
        f"{path.relative_to(found)}: {text}"
        for path in found.rglob("*")
        if path.is_file()
        for text in texts
        if text.encode() in path.read_bytes()
    ]


def test_no_secret_of_a_job_leaves_it(supervise, receiver, tmp_path):
    url, received = receiver(200)
    hidden = {
        name: secret(name)
        for name in ("Argv", "Option", "Word", "Login", "Query", "Env", "Title", "Notice", "Raised")
    }
    signed = "whsec_" + "c2VjcmV0" * 4
    supervise.env |= {
        "PAGER": f"{url}/slack/{secret('Pager')}",
        "HOOK": f"{url}/hook/{secret('Hook')}",
        "SIGNED_WITH": signed,
        "HF_TOKEN": hidden["Env"],
        "JOB_TITLE_KEY": hidden["Title"],
        "NOTICE_PASSWORD": hidden["Notice"],
        "DB_PASS": hidden["Raised"],
    }
    repository = ["init", "-q"], ["remote", "add", "o", f"https://u:{secret('Git')}@github.com/a"]
    for words in repository:
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    policy = tmp_path / "told.yaml"
    policy.write_text(POLICY)
    job = [
        "env",
        f"WANDB_API_KEY={hidden['Word']}",
        sys.executable,
        str(JOB),
        "--token",
        hidden["Argv"],
        f"--db-password={hidden['Option']}",
        f"--data=https://me:{hidden['Login']}@host/x?sig={hidden['Query']}",
    ]
    log = tmp_path / "out.txt"
    with log.open("w") as out:  # evidence has its end
        options = ("--policy", policy, "--run-dir", "run")
        running = supervise.start(*options, "--", *job, stdout=out)
        _, errors = running.communicate(timeout=200)
    run = tmp_path / "run"
    texts = [*hidden.values(), *map(secret, ("Pager", "Hook", "Git")), signed]

    assert run.is_dir(), errors
    assert where(run, texts) == []
    assert {path.split("/")[1] for path, _ in received} == {"slack", "hook"}
    assert [t for t in texts if t in json.dumps([body for _, body in received])] == []
    told = errors.split("Traceback")[0]  # the job's own comes behind it
    assert [t for t in texts if t in told] == []
    for words in (["status"], ["why"], ["audit", "show"], ["doctor", "--", *job[2:]]):
        said = supervise(*words, *([] if "doctor" in words else ["run"]))
        assert [t for t in texts if t in said.stdout] == [], words
    assert not list(tmp_path.glob(".*.secrets")), "kept after the end"
    shown = json.loads((run / "run.json").read_text())["argv"]
    assert {"WANDB_API_KEY=<redacted>", "--db-password=<redacted>", "<redacted>"} <= set(shown)
    bundle = next(run.glob("incidents/*/snapshot-1"))
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert {"HF_TOKEN", "PAGER", "SIGNED_WITH", "DB_PASS"} <= set(manifest["redacted"])
    assert "logged in with <redacted>" in next(bundle.glob("log-*")).read_text()
    supervise.prove("run")
