"""Hundreds of real runs under everything that can go wrong around them: `make chaos`.

    python tests/chaos/drive.py [--only AREA ...] [--scenario NAME ...] [--seed N]

Every scenario starts a real `supervise` on a real job, and insists: the exit code is the job's; the
job came to the end that it comes to without us; we end soon after it; nothing of ours is left; the
records can be read. It runs with seeds 0, 1, ... as often as its row says; `--seed` picks one. Two
run at a time; those that mostly wait run beside them, more at once. At the end: for
every failure its reason and the command that repeats it, and a line for each area. Exit code 1:
something failed.

What cannot be done here (mounting without rights) is skipped and counted as such.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import areas_processes  # noqa: F401
import areas_storage  # noqa: F401
import areas_streams  # noqa: F401
import areas_time  # noqa: F401
from world import SCENARIOS, Case, Scenario, Skip

AREAS = tuple(dict.fromkeys(each.area for each in SCENARIOS.values()))
MOST_S = 900.0  # of one scenario
IDLE_AT_ONCE = 8


class Outcome(NamedTuple):
    """Of one scenario: `how` is ok, failed or skipped."""

    scenario: Scenario
    seed: int
    how: str
    why: str
    seconds: float


def attempt(name: str, seed: int, answer: Any) -> None:
    """Run one scenario in this process, and send what came of it."""
    os.setpgid(0, 0)
    case = Case(name, seed)
    try:
        SCENARIOS[name].run(case)
        answer.send(("ok", ""))
    except Skip as skip:
        answer.send(("skipped", str(skip)))
    except AssertionError as error:
        answer.send(("failed", str(error) or traceback.format_exc(limit=-1)))
    except BaseException:
        answer.send(("failed", traceback.format_exc(limit=-3)))
    finally:
        case.close()


def judge(scenario: Scenario, seed: int) -> Outcome:
    """Run one scenario in a process of its own."""
    began = time.monotonic()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=attempt, args=(scenario.name, seed, sender)
    )
    process.start()
    sender.close()
    how, why = "failed", f"no answer within {MOST_S:g} s"
    if receiver.poll(MOST_S):
        try:
            how, why = receiver.recv()
        except EOFError:
            why = "the scenario's own process died"
        process.join(60)
    if process.is_alive():
        process.kill()
    return Outcome(scenario, seed, how, why, time.monotonic() - began)


def rounds(pairs: Iterable[tuple[Scenario, int]], at_once: int, idle: int) -> list[Outcome]:
    """Run all of it, a line for each; those that mostly wait beside the others."""
    lock = threading.Lock()

    def run(scenario: Scenario, seed: int) -> Outcome:
        outcome = judge(scenario, seed)
        with lock:
            seconds = f"{outcome.seconds:6.1f} s"
            print(f"{outcome.how:8}{seconds}  {scenario.area}: {scenario.name} {seed}", flush=True)
        return outcome

    with ThreadPoolExecutor(at_once) as busy, ThreadPoolExecutor(idle) as waiting:
        futures = [(waiting if s.idle else busy).submit(run, s, seed) for s, seed in pairs]
        return [future.result() for future in futures]


def report(outcomes: list[Outcome]) -> None:
    """Print the failures, the reasons of what was skipped, and a line for each area."""
    for outcome in outcomes:
        if outcome.how == "failed":
            repeat = f"--scenario {outcome.scenario.name} --seed {outcome.seed}"
            print(f"\nFAILED  {sys.executable} {sys.argv[0]} {repeat}")
            print(f"        {' '.join(outcome.why.split())[:900]}")
    for why in {outcome.why for outcome in outcomes if outcome.how == "skipped"}:
        print(f"\nskipped: {why}")
    for area in AREAS:
        counts = Counter(o.how for o in outcomes if o.scenario.area == area)
        if counts:
            print(f"{area:16}", *(f"{how} {count}" for how, count in sorted(counts.items())))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=AREAS, metavar="AREA", default=AREAS, help=", ".join(AREAS)
    )
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, metavar="NAME")
    parser.add_argument("--seed", type=int, help="this one instead of all")
    parser.add_argument("--jobs", type=int, default=2, help="at once, besides those that wait")
    parser.add_argument("--idle", type=int, default=IDLE_AT_ONCE, help="of those that wait")
    parser.add_argument("--list", action="store_true", help="print the scenarios and leave")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):  # a shell's `&` and nohup
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    names = args.scenario or [each.name for each in SCENARIOS.values() if each.area in args.only]
    picked = [SCENARIOS[name] for name in names]
    pairs = [(s, n) for s in picked for n in (range(s.seeds) if args.seed is None else [args.seed])]
    if args.list:
        for each in picked:
            print(f"{each.area:16}{each.name:34}{each.seeds:4}")
        print(f"{len(pairs)} runs")
        return 0
    pairs.sort(key=lambda pair: not pair[0].idle)
    outcomes = rounds(pairs, args.jobs, args.idle)
    report(outcomes)
    for path in Path(tempfile.gettempdir()).glob(f"supervise-chaos-baseline-{os.getpid()}-*"):
        path.unlink()
    return int(any(outcome.how == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
