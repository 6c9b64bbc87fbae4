"""Which monitor leads the loss for which fault, and by how many steps; writes `leadtime.md`.

    python benchmarks/leadtime.py [--suites dense moe] [--jobs 2] [--out benchmarks/.leadtime]
                                  [--judge-only]

`supervise drill suite` under `leadtime.yaml` on dense GPTs and a mixture of experts. `dense` and
`moe` are the faults of a mechanism, in runs that are long enough for slow ones, beside a healthy
run as reference; their healthy runs are the gate of false alarms. `dense-all` and `moe-all` are all
faults in short runs. Suites that are not asked for keep their part of the page. An interrupted
suite goes on. `--judge-only`: the rules of today judge the runs of `dense` and `moe` that are kept.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from supervise.catalog import load_policy
from supervise.core import initial_state, step
from supervise.core.model import Policy, RuleFired, Suppressed
from supervise.lab import events_of_run
from supervise.store import RunDir
from supervise.trials import (
    LOSS,
    METRICS,
    MUTED,
    Alarm,
    Drill,
    FaultArm,
    FaultResult,
    Finding,
    PlannedRun,
    Runs,
    SuiteReport,
    TrialPolicy,
    fault_result,
    read_fault,
    render_suite,
    summarize_fault,
    summarize_healthy_run,
    summarize_monitors,
)

HERE = Path(__file__).resolve().parent
PAGE = HERE / "leadtime.md"
SEEDS, HEALTHY = 3, 5
LONG, SHORT = (1600, 1000), (320, 120)  # steps of a run, and that of the fault
AGAINST = ("below_reference", "mechanisms.spectra_apart")  # rules that read the reference
MECHANISMS = ("attention_bias:bits=64", "attention_bias:bits=256", "lr_spike:factor=10")
ROUTERS = ("router:how=sharp", "router:how=flat", "router:how=common")
ALL = (
    *("lr_spike:factor=10", "bad_batch", "repeated_tokens", "shuffled_labels", "batch_cut"),
    *("moments", "attention_bias", "data_order", "weight_noise", "bit_flip:target=weight"),
    *("schedule_restart", "guard_off"),
)
PROGRAMS = HERE / "proving" / "programs"
EXAMPLE = (str(HERE.parent / "examples" / "nano" / "train.py"), "--threads", "1")
DENSE = (str(PROGRAMS / "byte_gpt.py"), "--rows", "8")
MOE = (str(PROGRAMS / "moe_gpt.py"), "--rows", "8")
PADDED = ("--step-ms", "100")  # sleeps; samples cost less of a step then, and runs share a core


@dataclass(frozen=True)
class Suite:
    """A job with its faults.

    Attributes:
        argv: after `python`.
        size: steps of a run, and that of the fault.
        acts: it runs with actions, too. compares: with a healthy run of another seed.
    """

    title: str
    argv: tuple[str, ...]
    faults: tuple[str, ...]
    size: tuple[int, int]
    acts: bool = False
    compares: bool = False


SUITES = {
    "dense": Suite(
        "Faults of a mechanism in a dense GPT (`proving/programs/byte_gpt.py`)",
        (*DENSE, *PADDED),
        MECHANISMS,
        LONG,
        compares=True,
    ),
    "moe": Suite(
        "Faults of a mechanism in a mixture of experts (`proving/programs/moe_gpt.py`)",
        (*MOE, *PADDED),
        (*MECHANISMS, *ROUTERS),
        LONG,
        compares=True,
    ),
    "dense-all": Suite(
        "All faults in the example: a dense GPT, 0.8 M parameters", EXAMPLE, ALL, SHORT, acts=True
    ),
    "moe-all": Suite(
        "All faults in the mixture of experts: four, two a token",
        MOE,
        (*ALL, *ROUTERS[:2]),
        SHORT,
    ),
}
METHOD = f"""`python benchmarks/leadtime.py`: `supervise drill suite` under `leadtime.yaml`,
{SEEDS} seeds, {HEALTHY} healthy runs. A monitor is a rule of the policy. What counts as leaving the
band, harm and `lost` is in `trials/drill_findings.py`."""
MECHANISM = f"""Faults of a mechanism: runs of {LONG[0]} steps of 100 ms, the fault at step
{LONG[1]}, and a healthy run of another seed as the reference of the rules
{" and ".join(f"`{rule}`" for rule in AGAINST)}; all other rules know the run's own past, or need
none. At that step attention and routers are sampled, so that a change in them is seen at once; in
another one it would be up to 50 and 10 steps later. Spectra come every 40 steps, and are judged at
their own. `router:how=common` halves the rows and shifts them by the same, which harms nothing and
has to stay silent. The healthy runs are the gate of false alarms: no SEV0 and no SEV1, and of a
rule that only notifies at most one in the 8000 steps of a job, but for rules of speed, which see
the other work on this machine. All faults: runs of {SHORT[0]} steps, the fault at step {SHORT[1]}.
"""


def command(suite: Suite) -> list[str]:
    """Return the job's command, with placeholders."""
    places = ["--steps", "{steps}", "--seed", "{seed}", "--out", "{out}"]
    return ["env", "OMP_NUM_THREADS=1", sys.executable, *suite.argv, *places]


def policy(name: str, suite: Suite, out: Path) -> Path:
    """Return the policy of a suite; make its reference run where there is none yet."""
    base = HERE / "leadtime.yaml"
    if not suite.compares:
        return base
    run, path = out / f"{name}-reference", out / f"{name}.yaml"
    values = {"{steps}": str(suite.size[0]), "{seed}": "0", "{out}": str(out / f"{name}-out")}
    watch = [sys.executable, "-m", "supervise", "run", "--policy", str(base), "--mode", "observe"]
    watch += ["--run-dir", str(run), "-q", "--"]
    if not path.exists():
        shutil.rmtree(run, ignore_errors=True)
        argv = [values.get(word, word) for word in command(suite)]
        subprocess.run([*watch, *argv], check=True, cwd=HERE)
        text = f"version: supervise/v1\nextends: {base}\nmechanisms: {{reference: {run}}}\n"
        path.write_text(text)
    return path


def tables(name: str, suite: Suite, out: Path, jobs: int) -> str:
    """Make the runs that are missing, and return the tables."""
    steps, fault_step = suite.size
    size = ["--steps", str(steps), "--at", str(fault_step), "--seeds", str(SEEDS)]
    size += ["--healthy", str(HEALTHY), "--jobs", str(jobs), "--fail-on", "nothing"]
    size += ["--act" if suite.acts else "--no-act"]
    size += [text for fault in suite.faults for text in ("--fault", fault)]
    ours = [sys.executable, "-m", "supervise", "drill", "suite", "--dir", str(out / name)]
    watch = ["--policy", str(policy(name, suite, out))]
    subprocess.run([*ours, *watch, *size, "--", *command(suite)], check=True, cwd=HERE)
    return (out / name / "suite.md").read_text()


def judged_tables(suite: Suite, directory: Path) -> str:
    """Return the tables of runs that are there, by the rules of today."""
    report = judge(suite, directory)
    return "\n".join([*compare(report.faults), render_suite(report)])


def judge(suite: Suite, directory: Path) -> SuiteReport:
    """Return the report of runs without actions, by the rules of today."""
    rules = replace(load_policy(str(HERE / "leadtime.yaml")), mode="observe")
    drills = [Drill(text, text.partition(":")[0]) for text in suite.faults]
    healthy = {seed: judged(directory / f"healthy-{seed}", rules) for seed in range(1, HEALTHY + 1)}
    runs = [
        Runs(
            drill,
            seed,
            judged(directory / PlannedRun(drill, seed, False).name, rules),
            None,
            healthy[seed],
        )
        for drill in drills
        for seed in range(1, SEEDS + 1)
    ]
    reads = {
        rule.id: {m for name in rules.detectors_of(rule) for m in rules.detectors[name].metrics}
        for rule in rules.rules
    }
    steps, fault_step = suite.size
    findings = [summarize_fault(run, LOSS, steps, reads) for run in runs]
    controls = [summarize_healthy_run(seed, arm, LOSS, steps) for seed, arm in healthy.items()]
    return SuiteReport(
        suite=directory.name,
        command=[],
        policy=TrialPolicy(rules.name, rules.digest, ()),
        means={},
        metric=LOSS,
        steps=steps,
        fault_step=fault_step,
        seeds=list(range(1, SEEDS + 1)),
        acts=suite.acts,
        notes=[],
        rules={},
        healthy=controls,
        faults=[fault_result(drill, findings) for drill in drills],
        monitors=summarize_monitors(findings, controls),
        plots={},
    )


def judged(path: Path, rules: Policy) -> FaultArm:
    """Return a run with the alarms that these rules have on its journal."""
    alarms: dict[tuple[str, int], Alarm] = {}
    state = initial_state(rules)
    for event in events_of_run(path):
        state, decisions = step(rules, state, event)
        for decision in decisions:
            rule, at = str(decision.rule), decision.step
            if isinstance(decision, RuleFired):
                alarms[rule, at] = Alarm(rule, str(decision.severity), at)
            elif isinstance(decision, Suppressed) and decision.cause in MUTED:
                alarms.pop((rule, at), None)
    arm = read_fault(RunDir.open(path), (LOSS, *METRICS), path.name)
    return replace(arm, alarms=tuple(alarms.values()))


def compare(faults: Sequence[FaultResult]) -> Iterator[str]:
    """Yield a table of the best monitor without a reference, and with one."""
    yield "| fault | loss leaves | without a reference | steps ahead | with it | steps ahead |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for fault in faults:
        seeds = [finding for finding in fault.seeds if not finding.excluded]
        cells = [fault.fault, spans([finding.departed for finding in seeds])]
        for compared in (False, True):
            cells += earliest(seeds, compared)
        yield f"| {' | '.join(cells)} |"
    yield ""


def earliest(seeds: Sequence[Finding], compared: bool) -> tuple[str, str]:
    """Return the best monitor with its delays, and by how much it leads the loss."""
    delays: dict[str, list[tuple[int, int | None]]] = {}
    for finding in seeds:
        for alarm in finding.detections:
            if (alarm.rule in AGAINST) == compared:
                delays.setdefault(alarm.rule, []).append((alarm.delay, finding.departed))
    if not delays:
        return "none", ""
    rule = min(delays, key=lambda r: (-len(delays[r]), sorted(d for d, _ in delays[r])))
    alarms = [delay for delay, _ in delays[rule]]
    ahead = [departed - delay for delay, departed in delays[rule] if departed is not None]
    return (
        f"{rule}, after {spans(alarms, len(seeds))}",
        spans(ahead, len(seeds)) if ahead else "the loss stays",
    )


def spans(values: Sequence[int | None], runs: int | None = None) -> str:
    """Return the range of the numbers, and in how many runs there is one, if not in all."""
    numbers = sorted(value for value in values if value is not None)
    runs = len(values) if runs is None else runs
    if not numbers:
        return "never"
    low, high = numbers[0], numbers[-1]
    text = str(low) if low == high else f"{low} to {high}"
    return text if len(numbers) == runs else f"{text} ({len(numbers)} of {runs})"


def page(parts: Mapping[str, str]) -> str:
    """Return the page; a suite without a part keeps the one that it has there."""
    before = re.split(r"^## (.*)\n", PAGE.read_text(), flags=re.MULTILINE)[1:]
    older = dict(zip(before[::2], (text.strip("\n") for text in before[1::2]), strict=True))
    lines = ["# Lead time of monitors", ""]
    for about in (METHOD, MECHANISM):
        lines += [textwrap.fill(" ".join(about.split()), 100, break_on_hyphens=False), ""]
    for name, suite in SUITES.items():
        text = parts.get(name, older.get(suite.title))
        if text is not None:
            lines += [f"## {suite.title}", "", text.strip("\n"), ""]
    return "\n".join(lines)


def main() -> None:
    """Make the suites, and the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=["dense", "moe"])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--judge-only", action="store_true", help="make no runs")
    parser.add_argument("--out", type=Path, default=HERE / ".leadtime")
    args = parser.parse_args()
    if args.judge_only and (others := [name for name in args.suites if not SUITES[name].compares]):
        judged_names = " and ".join(name for name, suite in SUITES.items() if suite.compares)
        parser.error(
            f"--judge-only is for {judged_names}, not {' and '.join(others)}: make its runs"
        )
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for name in args.suites:
        suite = SUITES[name]
        part = "" if args.judge_only else tables(name, suite, out, args.jobs)
        if suite.compares:
            part = judged_tables(suite, out / name)
        PAGE.write_text(page({name: part}))


if __name__ == "__main__":
    main()
