"""Small programs made from public bug reports, under shipped `nano`; writes `cases.md`.

    python benchmarks/cases.py FOLDER [--only TEXT] [--keep FOLDER]

Each case is a folder with `train.py`, `run.sh` (supervised, run directory in `$RUN`) and
`expected.md`, whose first line is the report. The program runs once by itself and once supervised;
both print the hash of the final weights and a held-out loss. `EXPECTED` states per case which
message has to come, between which steps and at which severity, which actions are permitted, and how
the run has to end. Exit code 1: an expectation does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supervise.store import RunDir, read_audit

TABLE = Path(__file__).resolve().with_name("cases.md")
LIMIT_S = 420.0
NEAR = 1.02  # a loss within 2 % of the reference counts as the same; two seeds differ by about 1 %
SHOWN = 200  # characters of a message in the table
FINAL = re.compile(r"^FINAL (\w+) eval (\S+)", re.MULTILINE)
LOSS = re.compile(r"^\d+ (\d\S*)", re.MULTILINE)


@dataclass(frozen=True)
class Notice:
    """A message that has to come.

    Attributes:
        says: regular expressions; each matches somewhere in the message.
        first, last: steps of the run between which it comes.
        severity: at least this one.
        attempt: of the run; 1 is the first relaunch.
    """

    says: tuple[str, ...]
    first: int
    last: int
    severity: str = "SEV2"
    attempt: int = 0


@dataclass(frozen=True)
class Expected:
    """The expectations of one case.

    Attributes:
        notice: None: no message above INFO at all.
        verbs: of the actions that are permitted.
        identical: the weights are those of the plain run, bit by bit.
        like: (old, new): the program without its fault, by this replacement; its held-out loss is
            the reference. None: the plain run's.
        below: the most that the final held-out loss may be, in multiples of the reference.
        best: the reference is the lowest loss that the plain run printed.
        code: exit code; None: any.
    """

    notice: Notice | None
    verbs: tuple[str, ...] = ()
    identical: bool = False
    like: tuple[str, str] | None = None
    below: float | None = None
    best: bool = False
    code: int | None = 0


ROLLBACK = ("pause", "rollback", "resume", "lr_scale", "hold_rate", "hold", "check_weights")
EXPECTED = {
    "01": Expected(
        Notice((r"0 tokens counted|without (any )?(targets|labels)",), 69, 75),
        like=("step % 70 == 69", "False"),
        below=NEAR,
    ),
    "03": Expected(
        Notice((r"learning rate", r"start(ed)? over"), 200, 210, attempt=1), verbs=("relaunch",)
    ),
    "05": Expected(Notice((r"batch", r"200", r"\b0\b"), 200, 207, attempt=1), verbs=("relaunch",)),
    "08": Expected(
        Notice((r"clipped in 100 % of the steps, by [1-9]e\+0[45]", r"loss has not moved"), 0, 100),
        identical=True,
    ),
    "10": Expected(
        Notice((r"8 of 10 tensors", r"never had a gradient: loras\.0\.a\.weight"), 0, 10),
        identical=True,
    ),
    "13": Expected(None, identical=True),
    "16": Expected(
        Notice((r"input", r"one token|single token|share 100"), 200, 210),
        verbs=ROLLBACK,
        code=None,
    ),
    "18": Expected(
        Notice((r"waits? for data|data (loader|worker)|next\(", r"train\.py:35"), 149, 153),
        verbs=("stop", "restart", "relaunch"),
        code=78,
    ),
    "22": Expected(Notice((r"data|input", r"since|from step"), 200, 255), identical=True),
    "25": Expected(Notice((r"data",), 250, 300), identical=True),
    "28": Expected(
        # The loss is 20 % above its best at step 370, and twice it at 372.
        Notice((r"learning rate|\blr\b",), 150, 370),
        verbs=ROLLBACK,
        below=1.1,
        best=True,
    ),
}


@dataclass(frozen=True)
class Run:
    """One run of a case.

    Attributes:
        code: exit code; None where it had to be ended.
        weights: hash of the final weights, "" where the program did not come to its end.
        loss: held out, None likewise.
        messages: of the audit log: step, attempt, severity, text.
        verbs: of the actions on the job.
    """

    code: int | None
    weights: str
    loss: float | None
    output: str
    messages: tuple[tuple[int, int, str, str], ...] = ()
    verbs: tuple[str, ...] = ()


def run(command: list[str], folder: Path, env: Mapping[str, str]) -> Run:
    """Run a command in `folder` to its end, or for LIMIT_S; `$RUN` is read where it wrote one."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=out, stderr=out)
        try:
            code: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()
            process.wait()
        out.seek(0)
        output = out.read()
    final = FINAL.search(output)
    messages, verbs = (
        record(Path(env["RUN"])) if Path(env["RUN"], "audit.log").exists() else ((), ())
    )
    weights, loss = (final[1], float(final[2])) if final else ("", None)
    return Run(code, weights, loss, output, messages, verbs)


def record(path: Path) -> tuple[tuple[tuple[int, int, str, str], ...], tuple[str, ...]]:
    """Return the messages above INFO of a run directory, and the actions on its job."""
    records = list(read_audit(RunDir.open(path).audit_path))
    messages = tuple(
        (r["step"], r["attempt"], r["severity"], text(r["data"]["message"]))
        for r in records
        if r["kind"] == "notify_intent" and r["severity"] in ("SEV0", "SEV1", "SEV2")
    )
    actions = (r["data"]["action"] for r in records if r["kind"] == "intent")
    return messages, tuple(a["verb"] for a in actions if a["touches_job"])


def text(message: Mapping[str, Any]) -> str:
    parts = (message.get(key) or "" for key in ("title", "verdict", "why", "next"))
    return " · ".join(" ".join(str(part).split()) for part in parts if part)


def judge(expected: Expected, plain: Run, healthy: Run, ours: Run) -> Iterator[str]:
    """Yield the expectations that do not hold."""
    notice = expected.notice
    if notice is None and ours.messages:
        yield f"not silent: {ours.messages[0][3]}"
    if notice is not None and answer(notice, ours) is None:
        yield f"no such message from step {notice.first} to {notice.last}"
    if other := set(ours.verbs) - set(expected.verbs):
        yield f"acted: {', '.join(sorted(other))}"
    if expected.identical and ours.weights != plain.weights:
        yield "weights differ"
    if expected.code is not None and ours.code != expected.code:
        yield f"exit code {ours.code}"
    if expected.below is not None:
        printed = [float(loss) for loss in LOSS.findall(plain.output)]
        reference = min(printed) if expected.best else healthy.loss
        assert reference is not None, "the healthy program did not come to its end"
        if ours.loss is None or not ours.loss <= expected.below * reference:
            yield f"ends at {ours.loss}, reference {reference:.4f}"


def answer(notice: Notice, ours: Run) -> tuple[int, str] | None:
    """Return step and text of the first message that is the expected one."""
    for step, attempt, severity, said in ours.messages:
        in_time = notice.first <= step <= notice.last and attempt >= notice.attempt
        grave = severity <= notice.severity  # SEV0 is the gravest
        if in_time and grave and all(re.search(part, said, re.IGNORECASE) for part in notice.says):
            return step, said
    return None


def row(case: Path, expected: Expected, home: Path) -> tuple[str, bool]:
    """Run a case; return its line of the table, and whether all holds."""
    env = {"RUN": str(home / "run")}
    plain = (
        run([sys.executable, "train.py"], case, {**env, "OUT": str(home / "plain")})
        if (
            case.name[:2] != "18"  # by itself it waits for ever
        )
        else Run(None, "", None, "")
    )
    healthy = plain
    if expected.like is not None:
        source = (case / "train.py").read_text().replace(*expected.like)
        (home / "train.py").write_text(source)
        healthy = run([sys.executable, "train.py"], home, {**env, "OUT": str(home / "healthy")})
    ours = run(["sh", str(case / "run.sh")], case, env)
    (home / "output.txt").write_text(ours.output)
    (home / "messages.json").write_text(json.dumps(ours.messages, indent=1))
    misses = list(judge(expected, plain, healthy, ours))
    first = answer(expected.notice, ours) if expected.notice else None
    shown = first or (ours.messages[0][::3] if ours.messages else None)
    message = shown[1].replace("|", "\\|") if shown else "none"
    cells = [
        case.name,
        number(plain.loss),
        number(ours.loss),
        "yes" if plain.weights and plain.weights == ours.weights else "no",
        ", ".join(dict.fromkeys(ours.verbs)) or "none",
        str(len(ours.messages)),
        f"{shown[0]}: {message[:SHOWN]}" if shown else "none",
        "; ".join(misses).replace("|", "\\|") or "as expected",
    ]
    return f"| {' | '.join(cells)} |", not misses


def number(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.4f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of the cases")
    parser.add_argument("--only", default="", help="cases with this text in their name")
    parser.add_argument("--keep", type=Path, help="folder for what the runs write")
    arguments = parser.parse_args()
    home = arguments.keep or Path(tempfile.mkdtemp(prefix="supervise-cases-"))
    lines, good = [], 0
    for case in sorted(arguments.folder.iterdir()):
        expected = EXPECTED.get(case.name[:2])
        if expected is None or arguments.only not in case.name:
            continue
        folder = home / case.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        line, holds = row(case.resolve(), expected, folder)
        lines.append(line)
        good += holds
        print(line, flush=True)
    table = [
        "# Small programs made from public bug reports\n",
        "Written by `python benchmarks/cases.py FOLDER`, whose docstring says what counts.\n",
        "| case | alone | supervised | same weights | actions | messages | the message | result |",
        "|---|---|---|---|---|---|---|---|",
        *lines,
        f"\n{good} of {len(lines)} are as expected.",
    ]
    if not arguments.only:
        TABLE.write_text("\n".join(table) + "\n", encoding="utf-8")
    if arguments.keep is None:
        shutil.rmtree(home, ignore_errors=True)
    return 0 if lines and good == len(lines) else 1


if __name__ == "__main__":
    sys.exit(main())
