"""What one frame costs the engine: 50 rules over 64 metrics, live and folded, against a floor.

    python benchmarks/engine.py [--frames 20000]

Floor: `struct.unpack` of the frame's 64 doubles plus one `sum` over them, in the same run. The
story is healthy noise with a spike every 2000 frames, so that rules fire and incidents open. Thread
CPU time, so that a busy machine disturbs little; what a second process gains is measured in wall
time too, which tells something on a free machine only.
"""

from __future__ import annotations

import argparse
import random
import statistics
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from operator import itemgetter
from pathlib import Path

from supervise.catalog import load_policy
from supervise.core import State, initial_state
from supervise.core import step as step_engine
from supervise.core.model import Announced, Detector, Frame, Launched, Policy, Rule
from supervise.detectors import Nonfinite, Ratio, RobustZ, Threshold, Trend
from supervise.detectors import Sequence as InOrder

METRICS, RULES = 64, 50
RUNS, PROCESSES = 6, 2
LARGE = 200  # rules of the policy that is loaded


def policy() -> Policy:
    """16 thresholds, 4 non-finite, 15 robust z, 8 ratios, 5 trends, 2 sequences; one rule each."""
    names = [f"m{i}" for i in range(METRICS)]
    detectors: dict[str, Detector] = {}
    for i in range(16):
        detectors[f"t{i}"] = Threshold(metric=names[i], gt=6.0, for_=2)
    for i in range(4):
        detectors[f"n{i}"] = Nonfinite(tuple(names[16 * i : 16 * i + 16]))
    for i in range(15):
        detectors[f"z{i}"] = RobustZ(metric=names[16 + i], gt=7.0, clear=3.0)
    for i in range(8):
        detectors[f"r{i}"] = Ratio(metric=names[31 + i], fast=4, slow=128, gt=6.0)
    for i in range(5):
        detectors[f"s{i}"] = Trend(metric=names[39 + i], window=400, slope_per_1k_gt=9.0)
    for i in range(2):
        detectors[f"c{i}"] = InOrder(steps=(f"z{i}", f"z{i + 4}", f"z{i + 8}"), within=8)
    rules = tuple(
        Rule(name, itemgetter(place), name, (name,), "SEV2") for place, name in enumerate(detectors)
    )
    return Policy("bench", "sha256:0", "observe", detectors, rules)


def frames(count: int) -> Iterator[Frame]:
    """Yield healthy noise around 3, with a spike in a third of the metrics every 2000 frames."""
    chance = random.Random(1)
    for step in range(count):
        values = [3.0 + chance.gauss(0.0, 0.2) for _ in range(METRICS)]
        if step % 2000 == 1999:
            for i in range(0, METRICS, 3):
                values[i] += 8.0
        yield Frame(step * 1_000_000, 0, 0, step, tuple(values))


def begin(bench: Policy) -> State:
    """Return the state of a run that has announced its metrics."""
    state = initial_state(bench)
    names = tuple(f"m{i}" for i in range(METRICS))
    for event in (Launched(0, 1, 0), Announced(0, 0, 1, 1, names)):
        state, _ = step_engine(bench, state, event)
    return state


def floor(story: Sequence[Frame]) -> tuple[float, float]:
    """Return the median of unpack and sum, and of the clock alone, in microseconds."""
    work, nothing = [], []
    for frame in story:
        data = struct.pack(f"<{METRICS}d", *frame.values)
        began = time.thread_time_ns()
        sum(struct.unpack(f"<{METRICS}d", data))
        work.append(time.thread_time_ns() - began)
        began = time.thread_time_ns()
        nothing.append(time.thread_time_ns() - began)
    clock = statistics.median(nothing) / 1e3
    return statistics.median(work) / 1e3 - clock, clock


def live(bench: Policy, story: Sequence[Frame]) -> tuple[list[float], int]:
    """Return microseconds per frame, ascending, and the number of decisions."""
    state, spent, decisions = begin(bench), [], 0
    for frame in story:
        began = time.thread_time_ns()
        state, made = step_engine(bench, state, frame)
        spent.append((time.thread_time_ns() - began) / 1e3)
        decisions += len(made)
    return sorted(spent), decisions


def fold(bench: Policy, story: Sequence[Frame]) -> float:
    """Fold a whole run; return frames per second of CPU time."""
    state = begin(bench)
    began = time.thread_time_ns()
    for frame in story:
        state, _ = step_engine(bench, state, frame)
    return len(story) / ((time.thread_time_ns() - began) / 1e9)


def one_run(count: int) -> float:
    """Fold one run in a process of its own; return its rate."""
    return fold(policy(), list(frames(count)))


def several_runs(count: int, processes: int) -> tuple[float, float]:
    """Fold RUNS runs; return frames per second of wall time, and the median rate of one run."""
    with ProcessPoolExecutor(processes) as pool:
        list(pool.map(one_run, [100] * processes))  # all have started
        began = time.perf_counter()
        rates = list(pool.map(one_run, [count] * RUNS))
        return RUNS * count / (time.perf_counter() - began), statistics.median(rates)


def large_policy() -> str:
    """Return a policy of 200 detectors and 200 rules, as YAML."""
    kinds = (
        "{{kind: threshold, metric: m{i}, gt: 6.0, clear: 5.0, for: 2}}",
        "{{kind: robust_z, metric: m{i}, gt: 8.0, clear: 4.0, m_of_n: [2, 3]}}",
        "{{kind: ratio, metric: m{i}, fast: 4, slow: 128, gt: 2.0}}",
        "{{kind: trend, metric: m{i}, window: 400, slope_per_1k_gt: 0.02}}",
    )
    lines = ["version: supervise/v1", "policy: large", "mode: observe", "detectors:"]
    lines += [f"  d{i}: {kinds[i % 4].format(i=i)}" for i in range(LARGE)]
    lines += ["rules:"]
    for i in range(LARGE):
        when = f"d{i} and not d{(i + 7) % LARGE}" if i % 3 else f"d{i}"
        lines.append(f"  - {{id: r{i}, when: {when}, sev: SEV2}}")
    return "\n".join(lines) + "\n"


def load_ms() -> float:
    """Return the CPU milliseconds of loading the large policy, median of five."""
    with tempfile.TemporaryDirectory() as folder:
        path, spent = Path(folder) / "large.yaml", []
        path.write_text(large_policy(), encoding="utf-8")
        for _ in range(5):
            began = time.thread_time_ns()
            loaded = load_policy(path)
            spent.append((time.thread_time_ns() - began) / 1e6)
        assert len(loaded.rules) == LARGE
        return statistics.median(spent)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=20_000)
    count = parser.parse_args().frames
    bench, story = policy(), list(frames(count))
    assert len(bench.rules) == RULES
    floor_us, clock_us = floor(story)
    spent, decisions = live(bench, story)
    live_us = [spent[int(part * count)] - clock_us for part in (0.5, 0.99)]
    mean_us = statistics.fmean(spent) - clock_us
    rates = [fold(bench, story) for _ in range(5)]
    alone, each_alone = several_runs(count, 1)
    together, each = several_runs(count, PROCESSES)

    print(f"{RULES} rules over {METRICS} metrics, {count} frames, {decisions} decisions")
    print(f"  floor: unpack + sum              {floor_us:8.2f} us median")
    print(f"  engine.step, live                {live_us[0]:8.2f} us median     (at most 40)")
    print(f"  engine.step, live                {mean_us:8.2f} us mean, {live_us[1]:.0f} us p99")
    print(f"  engine.step / floor              {live_us[0] / floor_us:8.1f}")
    print(
        f"  folded, one process              {statistics.median(rates):8.0f} frames/s   "
        f"(at least 25000; {min(rates):.0f} to {max(rates):.0f} in 5 folds)"
    )
    gain = PROCESSES * each / each_alone
    print(f"  {RUNS} runs, {PROCESSES} processes              {gain:8.2f} x the CPU rate of one")
    print(f"                                   {together / alone:8.2f} x its wall rate")
    print(f"  load a policy of {LARGE} rules       {load_ms():8.0f} ms          (less than 300)")


if __name__ == "__main__":
    main()
