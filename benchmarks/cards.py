"""Is each statement on a card true? More than sixty runs with known faults; writes `cards.md`.

    python benchmarks/cards.py [--keep FOLDER] [--only TEXT]
    python benchmarks/cards.py --judge-only --keep FOLDER      the texts of today, without training

A run is a program and a fault: of `cards_job.py`, which makes it itself and says nothing, or of the
proving ground with a drill. It runs under shipped `nano`, once, and is kept; each program also runs
undisturbed, in mode observe, up to the fault the same bit by bit. `cards_replay.py` writes cards
and messages from the kept journal with the code of today; a run whose actions are not the same any
more is made again (with `--judge-only` it is left out, and said). `cards_judge.py` judges each
statement by the fault, the undisturbed run and the frames. Exit code 1: fewer than 95 % of the
cards are free of a false statement.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from cards_judge import END, RESUMED, Cell, Finding, Truth, judge
from cards_replay import Sent, Told, told

HERE = Path(__file__).resolve().parent
TABLE = HERE / "cards.md"
LIMIT_S = 240.0
GOAL, LEAST = 0.95, 60  # share of the cards; runs of a table
AT, LATE, STEPS = 120, 150, 300  # the last checkpoint before LATE is of AT
HEALTHY = "none"
DRILLS = {
    "byte_gpt": ("lr_spike", "moments", "weight_noise", "repeated_tokens:steps=30"),
    "memorize": ("lr_spike:factor=100", "bad_batch:steps=1", "nan_grad", HEALTHY),
    "cnn_batchnorm": ("lr_spike", "bit_flip:target=weight", HEALTHY),
    "hf_trainer": ("lr_spike", "nan_grad", "crash", HEALTHY),
    "lightning_fit": ("lr_spike", "moments"),
    "lstm_sgd": ("bad_batch:steps=30", "lr_spike"),
    "gan": ("lr_spike", HEALTHY),
    "muon": ("lr_spike:factor=100", "weight_noise"),
    "vit": ("bit_flip:target=weight", "attention_bias"),
    "accumulate_amp": ("overflow_storm:steps=60",),
}
OWN = {
    "lm": (
        *("rate:10", "rate:100", "rate:1000", "rate_stays:30", "creep:1.06", "bad_batch"),
        *("bad_batches", "nan_loss", "nan_grad", "bit", "moments:10000", "one_token"),
        *("slow_input:0.08", "hang", "kill", "full_disk", "resume_moments", "resume_schedule"),
        *("heals", "evaluates", "decays", "restarts", "new_data", HEALTHY),
    ),
    "lm_flat": ("rate:30", "bad_batches", "bit", "one_token", HEALTHY),
    "mlp": (
        *("rate:100", "rate:1000", "creep:1.06", "bad_batch", "bad_batches", "nan_loss"),
        *("nan_grad", "bit", "moments:10000", "dark", "slow_input:0.08", "decays", HEALTHY),
    ),
    "conv": ("rate:100", "bad_batches", "nan_loss", "bit", "dark", "full_disk", "kill", "restarts"),
    "vae": ("rate:300", "bad_batch", "nan_loss", "bit", "dark", HEALTHY),
    "rnn": ("rate:100", "bad_batches", "nan_grad", "moments:10000", "one_token", "heals"),
    "ddp": ("rate:100", "nan_grad", "dead_rank", "drift", "slow_input:0.08", "hang"),
}
SAVING = (*RESUMED, "kill", "full_disk")  # their checkpoints are verified, which takes its time
POLICY = """version: supervise/v1
extends: nano
job: {{relaunch: {{args: ["--resume"]}}, on_crash: restart, checkpoints: {{glob: ["{out}/*.pt"]}}}}
"""


def cells() -> list[Cell]:
    """Return all runs, mixed, so that the first ones are of all kinds."""
    own = [
        Cell(program, fault, LATE if fault in RESUMED else AT)
        for program, faults in OWN.items()
        for fault in faults
    ]
    drills = [Cell(p, fault, AT, is_drill=True) for p, faults in DRILLS.items() for fault in faults]
    every = own + drills
    random.Random(3).shuffle(every)
    return every


def command(cell: Cell, folder: Path, *, is_plain: bool) -> list[str]:
    """Return the command of a run, or of the undisturbed one of its program."""
    policy = "nano"
    if cell.fault in RESUMED and not is_plain:
        policy = str(folder / "policy.yaml")
        Path(policy).write_text(POLICY.format(out=folder / "out"))
    words = ["--policy", policy, "--run-dir", str(folder / "run")]
    words += ["--mode", "observe", "-q"] if is_plain else []
    fault = HEALTHY if is_plain else cell.fault
    if cell.is_drill:
        script = [str(HERE / "proving" / "programs" / f"{cell.program}.py"), f"--steps={STEPS}"]
        words += [] if fault == HEALTHY else ["--drill", f"{fault}@{cell.at}"]
    else:
        script = [str(HERE / "cards_job.py"), cell.program, f"--fault={fault}", f"--at={cell.at}"]
        script += [f"--steps={STEPS}"]
        script += [f"--out={folder / 'out'}"] if fault in SAVING else []
    if cell.program == "ddp":
        script = ["-m", "torch.distributed.run", "--nproc-per-node=2", *script]
    return [sys.executable, "-m", "supervise", "run", *words, "--", sys.executable, *script]


def make(cell: Cell, folder: Path, *, is_plain: bool = False) -> None:
    """Run a cell; what it was ended with is in `made.json`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")}
    started, was_ended = time.monotonic(), False
    with (folder / "console.txt").open("w") as out:
        process = subprocess.Popen(
            command(cell, folder, is_plain=is_plain), cwd=folder, env=env, stdout=out, stderr=out
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            was_ended = True
            process.send_signal(signal.SIGTERM)
            code = process.wait(60.0)
    made = {"code": code, "was_ended": was_ended, "took_s": round(time.monotonic() - started, 1)}
    (folder / "made.json").write_text(json.dumps(made))


def judged(
    cell: Cell, keep: Path, today: Path, *, make_it: bool
) -> tuple[Told, list[Finding]] | str:
    """Return what a run tells, and what of it is false; a reason where it cannot be judged."""
    folder, plain = keep / cell.name, keep / "plain" / cell.plain
    if make_it and not (plain / "made.json").exists():
        make(cell, plain, is_plain=True)
    for _ in range(2):
        if not (folder / "made.json").exists():
            if not make_it:
                return "not made yet"
            make(cell, folder)
        own = folder / "policy.yaml"
        says = told(folder / "run", str(own) if own.exists() else "nano")
        if not says.differs:
            break
        if not make_it:
            return f"to be made again: {says.differs}"
        shutil.rmtree(folder)
    else:
        return f"replay differs: {says.differs}"
    truth = Truth.read(
        cell, folder / "run", plain / "run", json.loads((folder / "made.json").read_text())
    )
    found = list(judge(truth, says))
    today = today / cell.name
    shutil.rmtree(today, ignore_errors=True)
    today.mkdir(parents=True)
    for incident, (document, card) in says.cards.items():
        (today / f"{incident}.json").write_text(json.dumps(document, indent=1))
        (today / f"{incident}.txt").write_text(card + "\n")
    texts = [f"[{m.kind} after event {m.event}]\n{m.text}" for m in says.messages]
    (today / "messages.txt").write_text("\n\n".join(texts) + "\n")
    (today / "findings.json").write_text(json.dumps([asdict(f) for f in found], indent=1))
    return says, found


def table(rows: list[str], kinds: Counter[str], count: Counter[str]) -> str:
    """Return the whole table."""
    cards, free, with_messages = count["cards"], count["free"], count["free with messages"]
    share = f"{free} of {cards} cards ({free / max(1, cards):.0%}) are free of a false statement"
    share += f"; with the messages about them {with_messages} ({with_messages / max(1, cards):.0%})"
    return "\n".join(
        [
            "# Is each statement on a card true?\n",
            "Written by `python benchmarks/cards.py`, whose docstring says what counts.\n",
            f"{count['runs']} of {len(cells())} runs; {share}.\n",
            "| kind of false statement | statements |",
            "|---|---|",
            *(f"| {kind} | {count} |" for kind, count in kinds.most_common()),
            "",
            "| program | fault | cards | false | the first one |",
            "|---|---|---|---|---|",
            *rows,
        ]
    )


def is_crash(sent: Sent) -> bool:
    """Return whether a message tells of an end of the job that is no good one."""
    return sent.kind == "finished" and sent.message.severity != "INFO"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", type=Path, default=HERE / ".cards", help="folder of the runs")
    parser.add_argument("--today", type=Path, help="folder for the texts; default: below --keep")
    parser.add_argument("--only", default="", help="runs with this text in their name")
    parser.add_argument("--judge-only", action="store_true", help="make no run")
    parser.add_argument("--first", type=int, default=10**9, help="so many runs")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no run after this time")
    options = parser.parse_args()
    if options.today is not None and options.today.resolve() == options.keep.resolve():
        parser.error("--today is the folder of the runs: the texts of a run replace its folder")
    keep, until = options.keep.resolve(), time.monotonic() + options.seconds
    chosen = [cell for cell in cells() if options.only in cell.name][: options.first]
    rows, kinds, count = [], Counter[str](), Counter[str]()
    for cell in chosen:
        may_make = not options.judge_only and time.monotonic() < until
        outcome = judged(cell, keep, options.today or keep / "today", make_it=may_make)
        if isinstance(outcome, str):
            if outcome != "not made yet":
                print(f"{cell.name}: {outcome}", flush=True)
            continue
        says, found = outcome
        false = [finding for finding in found if finding.is_false]
        of_run = {*says.cards} or {END for sent in says.messages if is_crash(sent)}
        bad = {finding.incident for finding in false}
        on_cards = {f.incident for f in false if f.is_on_card or f.incident == END}
        count.update(runs=1, cards=len(of_run), free=len(of_run - on_cards))
        count["free with messages"] += len(of_run - bad)
        kinds.update(finding.kind for finding in false)
        for finding in found:
            print(finding.line(cell), flush=True)
        if not found:
            print(f"{cell.name}: {len(of_run)} cards, all true", flush=True)
        first = false[0].text().replace("|", "\\|") if false else ""
        rows.append(f"| {cell.program} | {cell.fault} | {len(of_run)} | {len(false)} | {first} |")
    text = table(sorted(rows), kinds, count)
    print(text.partition("\n| program")[0])
    if len(chosen) == len(cells()) and count["runs"] >= LEAST:
        TABLE.write_text(text + "\n", encoding="utf-8")
    return 0 if count["cards"] and count["free"] >= GOAL * count["cards"] else 1


if __name__ == "__main__":
    sys.exit(main())
