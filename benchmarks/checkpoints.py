"""Whose checkpoints can be evaluated, and which faults their evaluation reports.

    python benchmarks/checkpoints.py [--only kinds,drills,data]

Kinds: a job is trained for some steps with `job: {evaluate: ...}`, and its newest checkpoint is
evaluated by `supervise checkpoint eval`. The model is proved where the rebuilt one has the output
that the job had, and UNKNOWN otherwise, with the reason. litgpt has to be installed.

Drills: a fault strikes a live job that evaluates and saves every so many steps, in mode `observe`;
the table has the rules that fired and do not in the same job without it. Data: each fault of
`supervise data drill` is planted in a corpus that the gate passes, and checked against its
manifest. Expected is the rule that the fault is for. As root it gives evaluations its own priority.

Writes `checkpoints.md`. Finished runs are kept in `.checkpoints/`, and an interrupted one resumes.
Exit code 1: a kind is neither proved nor has a reason, or a fault is not reported by its rule.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from supervise.data import FAULTS
from supervise.store import RunDir, read_audit

HERE = Path(__file__).resolve().parent
PROGRAMS, RUNS, TABLE = (
    HERE / "proving" / "programs",
    HERE / ".checkpoints",
    HERE / "checkpoints.md",
)
NANO = HERE.parent / "examples" / "nano" / "train.py"
JOB = str(HERE / "checkpoints_job.py")
SUPERVISE = (sys.executable, "-m", "supervise")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
POLICY = """version: supervise/v1
policy: evaluated
mode: observe
use: [checkpoint, quality, evaluation, loss_spike]
job: {{evaluate: {{{evaluate}}}, checkpoints: {{verify: [load, finite]}}}}
"""
LIMIT_S = 900.0
CACHE = Path(tempfile.gettempdir()) / "supervise-frameworks"
AT = 130  # step of a fault
PROVED = "proved equal"


@dataclass(frozen=True)
class Kind:
    """A job whose checkpoints are evaluated.

    Attributes:
        argv: behind `python`; OUT stands for its folder. reimport: see `job.evaluate`.
    """

    name: str
    argv: tuple[str, ...]
    reimport: bool = False


OUT = "{out}"
NAMED = ("--steps=120", f"--out={OUT}")
KINDS = (
    Kind("the example `nano`", (str(NANO), "--steps=60", "--checkpoint-every=20", f"--out={OUT}")),
    Kind(
        "`nano`, DDP, 2 ranks",
        (*TORCHRUN, str(NANO), "--steps=40", "--checkpoint-every=20", f"--out={OUT}"),
    ),
    Kind("plain loop, byte GPT", (JOB, "--model=byte", "--every=40", *NAMED)),
    Kind("plain loop, Llama of transformers", (JOB, "--model=llama", "--every=40", *NAMED)),
    Kind("mixture of experts, no `__main__` guard", (str(PROGRAMS / "moe_gpt.py"), *NAMED)),
    Kind("the same with `reimport: true`", (str(PROGRAMS / "moe_gpt.py"), *NAMED), reimport=True),
    Kind("Trainer, GPT-2 of transformers", (str(PROGRAMS / "hf_trainer.py"), *NAMED)),
    Kind("Trainer, 2 ranks", (*TORCHRUN, str(PROGRAMS / "hf_trainer.py"), *NAMED)),
    Kind("Lightning", (str(PROGRAMS / "lightning_fit.py"), *NAMED), reimport=True),
    Kind(
        "litgpt",
        ("-m", "litgpt", "pretrain", f"--config={PROGRAMS / 'litgpt.yaml'}", f"--out_dir={OUT}"),
    ),
)
# Evaluations of the job, and of checkpoints, which take a minute at nice 19 on a busy machine.
FAST = ("--steps=320", "--every=40", "--step-ms=50")
SLOW = ("--steps=200", "--every=100", "--step-ms=1200")
LONG = ("--steps=320", "--every=80", "--step-ms=500")  # behind a last step no rule fires
DRILLS = {
    "eval_mismatch": (FAST, "evaluation.val_loss"),
    "weight_noise": (FAST, "loss_spike.jump"),
    "bad_checkpoint:how=noise": (SLOW, "quality.other_weights"),
    "bad_checkpoint:how=optimizer": (SLOW, "quality.parts_lost"),
    "bad_checkpoint:how=scheduler": (SLOW, "quality.parts_lost"),
    "bad_checkpoint:how=rng": (SLOW, "quality.parts_lost"),
    "bad_checkpoint:how=truncate": (LONG, "checkpoint.verification_failed"),
}
ABUSE_SCORER = '"""Finds one word."""\n\n\n'
ABUSE_SCORER += "def score(texts):\n    return ['idiot' in text for text in texts]\n"
REJECTS = '{"length": {"dropped": 300, "total": 3000}}'


def hasten() -> None:
    """Give what runs at nice 19 the priority of this process, as other work would starve it.

    How long an evaluation waits is no matter of these tables. It takes root.
    """
    own = psutil.Process()
    while True:
        with suppress(psutil.Error):
            for child in own.children(recursive=True):
                if child.nice() > own.nice():
                    child.nice(own.nice())
        time.sleep(0.5)


def slug(text: str) -> str:
    """Return a name of a folder."""
    return re.sub(r"\W+", "-", text).strip("-")


def kept(name: str, make: Callable[[Path], Any]) -> Any:
    """Return a result that was made before, or make it in a folder of its own."""
    folder = RUNS / slug(name)
    file = folder.with_suffix(".json")
    if not file.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        result = make(folder)
        file.write_text(json.dumps(result))
        print(name, result, flush=True)
    return json.loads(file.read_text())


def supervised(folder: Path, argv: Sequence[str], evaluate: str, *flags: str) -> Path:
    """Train a job under supervision; return the directory of its run."""
    (folder / "policy.yaml").write_text(POLICY.format(evaluate=evaluate))
    command = [part.replace(OUT, str(folder / "out")) for part in argv]
    path = os.pathsep.join(filter(None, [str(PROGRAMS), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TMPDIR": str(folder)}
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE))
    start = [*SUPERVISE, "run", "-q", "--policy", "policy.yaml", "--run-dir", "run", *flags, "--"]
    with (folder / "job.txt").open("w") as output:
        done = subprocess.run(
            [*start, sys.executable, *command],
            cwd=folder,
            env=env,
            stdout=output,
            stderr=output,
            timeout=LIMIT_S,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"checkpoints.py: exit code {done.returncode}, see {folder / 'job.txt'}")
    return folder / "run"


# ── kinds of jobs ─────────────────────────────────────────────────────────────────────────────────


def evaluate_kind(kind: Kind, folder: Path) -> dict[str, Any]:
    """Train, then evaluate the newest checkpoint."""
    reimport = f"reimport: {str(kind.reimport).lower()}"
    run = supervised(folder, kind.argv, reimport)
    verify = [*SUPERVISE, "checkpoints", "--verify", str(run)]  # at its end there is a minute
    subprocess.run(verify, check=True, stdout=subprocess.DEVNULL)
    newest = json.loads((run / "checkpoints.json").read_text())["checkpoints"][-1]
    argv = [*SUPERVISE, "checkpoint", "eval", newest["id"], "--run", str(run), "--json"]
    argv += ["--reimport"] * kind.reimport
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return dict(json.loads(done.stdout))


def kind_row(kind: Kind) -> tuple[list[str], bool]:
    """Return the row of a kind, and whether it is neither proved nor explained."""
    answer = kept(kind.name, lambda folder: evaluate_kind(kind, folder))
    if answer["reason"]:
        reason = answer["reason"].replace(f"{HERE}{os.sep}", "")
        return [kind.name, f"UNKNOWN: {reason}", "", ""], False
    was, now = answer["was"], answer["now"]
    equal = PROVED if was == now else f"proved, {abs(now - was):.1g} apart"
    parts = ", ".join(f"{name} {verdict}" for name, verdict in answer["parts"].items())
    return [kind.name, equal, str(len(answer["values"])), parts], was is None or now is None


# ── faults in a live job ──────────────────────────────────────────────────────────────────────────


def fired(folder: Path, fault: str, pace: Sequence[str]) -> list[str]:
    """Return the rules that fired in a job with a fault, or with none."""
    flags = ["--drill", f"{fault}@{AT}"] if fault else []
    argv = [JOB, "--model=byte", *pace, f"--out={OUT}"]
    run = supervised(folder, argv, "every: checkpoint", *flags)
    records = read_audit(RunDir.open(run).audit_path)
    return sorted({record["rule"] for record in records if record.get("rule")})


def drill_rows() -> tuple[list[list[str]], list[str]]:
    """Return a row for each fault, and those that are not reported by their rule."""
    runs = {**{fault: pace for fault, (pace, _) in DRILLS.items()}, "": FAST, " ": SLOW}

    def result(fault: str) -> list[str]:
        name = f"drill {fault.strip() or 'none'} {runs[fault][1]}"
        return list(kept(name, lambda folder: fired(folder, fault.strip(), runs[fault])))

    with ThreadPoolExecutor(5) as pool:  # they sleep for most of the time
        results = dict(zip(runs, pool.map(result, runs), strict=True))
    healthy = {*results[""], *results[" "]}
    rows, missed = [], []
    for fault, (_, expected) in DRILLS.items():
        own = [rule for rule in results[fault] if rule not in healthy]
        rows.append([f"`{fault}`", expected, ", ".join(own) or "none"])
        missed += [] if expected in own else [fault]
    rows.append(["none", "", ", ".join(sorted(healthy)) or "none"])
    return rows, missed


# ── faults in data ────────────────────────────────────────────────────────────────────────────────


def write_corpus(folder: Path) -> None:
    """Write two sources of the sources of Python, and held-out ones."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [p for p in sorted(library.rglob("*.py")) if "site-packages" not in p.parts]
    texts = {t: None for p in paths if 2000 < len(t := p.read_text("utf-8", "replace")) < 60_000}
    docs = list(texts)
    random.Random(0).shuffle(docs)
    for name, part in (("a", docs[:500]), ("b", docs[500:700]), ("../val/c", docs[700:760])):
        file = folder / "data" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in part))


def data_drills(folder: Path) -> dict[str, list[str]]:
    """Return the rules that fired, by planted fault; "" is the corpus as it was."""
    write_corpus(folder)
    (folder / "scorer.py").write_text(ABUSE_SCORER)
    (folder / "rejects.json").write_text(REJECTS)
    more = ["--val", "val", "--toxicity", "scorer:score"]
    env = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}

    def run(*argv: str) -> str:
        command = [*SUPERVISE, "data", *argv]
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        if done.returncode > 1:
            raise SystemExit(f"checkpoints.py: {' '.join(argv)}: {done.stderr}")
        return done.stdout

    def rules(*argv: str) -> list[str]:
        document = json.loads(run("check", *argv, *more, "--json"))
        return [row["rule"] for row in document["findings"] if row["status"] == "fail"]

    given = ["data", "--rejects", "rejects.json"]
    alone = rules(*given, "--manifest", "base.json")
    found = {"": [*alone, *rules(*given, "--baseline", "base.json")]}
    for fault in FAULTS:
        run("drill", fault, "data", fault, "--val", "val", "--rejects", "rejects.json")
        given = ["--rejects", f"{fault}.rejects.json"] if fault == "filter" else []
        found[fault] = rules(fault, "--baseline", "base.json", *given)
        shutil.rmtree(folder / fault)
    return found


def data_rows() -> tuple[list[list[str]], list[str]]:
    """Return a row for each planted fault, and those that are not reported by their rule."""
    found = kept("data", data_drills)
    rows, missed = [], []
    for name, fault in FAULTS.items():
        own = [rule for rule in found[name] if rule not in found[""]]
        expected = f"data_build.{fault.rule}"
        rows.append([f"`{name}` at {fault.rate:g}", expected, ", ".join(own) or "none"])
        missed += [] if expected in own else [name]
    rows.append(["none", "", ", ".join(found[""]) or "none"])
    return rows, missed


# ── the page ──────────────────────────────────────────────────────────────────────────────────────

HEAD = """# Checkpoints that are evaluated, and faults that are reported

Written by `python benchmarks/checkpoints.py`; its docstring says what the tables are of.
"""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="kinds,drills,data")
    parser.add_argument("--kind", action="append", help="part of the name of a kind; default: all")
    options = parser.parse_args()
    threading.Thread(target=hasten, daemon=True).start()
    missed: list[str] = []
    parts = []
    if "kinds" in options.only:
        rows = []
        for kind in KINDS:
            if not options.kind or any(part in kind.name for part in options.kind):
                row, bad = kind_row(kind)
                rows.append(row)
                missed += [kind.name] * bad
        header = ("job", "the rebuilt model", "values", "restored")
        parts.append("## Kinds of jobs\n\n" + table(header, rows))
    header = ("fault", "expected", "rules that fired")
    if "drills" in options.only:
        rows, bad_ones = drill_rows()
        missed += bad_ones
        about = (
            "A byte GPT that evaluates and saves every 40 steps of 50 ms, or every 100 of 1.2 s\n"
            f"where checkpoints are struck; the fault begins at step {AT}.\n\n"
        )
        parts.append("## Faults of a live job\n\n" + about + table(header, rows))
    if "data" in options.only:
        rows, bad_ones = data_rows()
        missed += bad_ones
        about = "700 sources of Python's standard library, 60 held out.\n\n"
        parts.append("## Faults of data\n\n" + about + table(header, rows))
    page = "\n".join([HEAD, *parts])
    if len(parts) == 3 and not options.kind:
        TABLE.write_text(page)
    print(page)
    print("\n".join(f"missed: {name}" for name in missed))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
