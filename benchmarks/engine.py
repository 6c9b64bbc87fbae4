"""What one frame costs the engine: 50 rules over 64 metrics, live and folded, against a floor.

    python benchmarks/engine.py [--frames 20000]

Floor: `struct.unpack` of the frame's 64 doubles plus one `sum` over them, in the same run. The
story is healthy noise with a spike every 2000 frames, so that rules fire and incidents open. Thread
CPU time, so that a busy machine disturbs little.
"""

from __future__ import annotations

import argparse
import random
import statistics
import struct
import time
from collections.abc import Iterator
from operator import itemgetter

from supervise.core import engine
from supervise.core.rule import Policy, Rule
from supervise.core.shapes import Detector
from supervise.core.values import Announced, Frame, Launched
from supervise.detectors.nonfinite import Nonfinite
from supervise.detectors.ratio import Ratio
from supervise.detectors.robust_z import RobustZ
from supervise.detectors.sequence import Sequence
from supervise.detectors.threshold import Threshold
from supervise.detectors.trend import Trend

METRICS, RULES = 64, 50


def policy() -> Policy:
    """16 thresholds, 4 non-finite, 15 robust z, 8 ratios, 5 trends, 2 sequences; one rule each."""
    names = [f"m{i}" for i in range(METRICS)]
    detectors: dict[str, Detector] = {}
    for i in range(16):
        detectors[f"t{i}"] = Threshold(metric=names[i], gt=6.0, for_=2)
    for i in range(4):
        detectors[f"n{i}"] = Nonfinite(metrics=tuple(names[16 * i : 16 * i + 16]))
    for i in range(15):
        detectors[f"z{i}"] = RobustZ(metric=names[16 + i], gt=7.0, clear=3.0)
    for i in range(8):
        detectors[f"r{i}"] = Ratio(metric=names[31 + i], fast=4, slow=128, gt=6.0)
    for i in range(5):
        detectors[f"s{i}"] = Trend(metric=names[39 + i], window=400, slope_per_1k_gt=9.0)
    for i in range(2):
        detectors[f"c{i}"] = Sequence(steps=(f"z{i}", f"z{i + 4}", f"z{i + 8}"), within=8)
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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=20_000)
    count = parser.parse_args().frames
    bench, story = policy(), list(frames(count))
    assert len(bench.rules) == RULES
    raw = [struct.pack(f"<{METRICS}d", *frame.values) for frame in story]

    floor = []
    for data in raw:
        began = time.thread_time_ns()
        sum(struct.unpack(f"<{METRICS}d", data))
        floor.append(time.thread_time_ns() - began)
    nothing = []
    for _ in raw:
        began = time.thread_time_ns()
        nothing.append(time.thread_time_ns() - began)
    clock_ns = statistics.median(nothing)

    state = engine.start(bench)
    for event in (Launched(0, 1, 0), Announced(0, 0, 1, 1, tuple(f"m{i}" for i in range(METRICS)))):
        state, _ = engine.step(bench, state, event)
    live, decisions = [], 0
    whole = time.thread_time_ns()
    for frame in story:
        began = time.thread_time_ns()
        state, made = engine.step(bench, state, frame)
        live.append(time.thread_time_ns() - began)
        decisions += len(made)
    whole = time.thread_time_ns() - whole

    floor_us = (statistics.median(floor) - clock_ns) / 1e3
    live_us = (statistics.median(live) - clock_ns) / 1e3
    rate = count / ((whole - count * 2 * clock_ns) / 1e9)
    print(f"{RULES} rules over {METRICS} metrics, {count} frames, {decisions} decisions")
    print(f"  floor: unpack + sum          {floor_us:8.2f} us median")
    print(f"  engine.step, live            {live_us:8.2f} us median")
    print(f"  engine.step / floor          {live_us / floor_us:8.1f}")
    print(f"  folded                       {rate:8.0f} frames/s")


if __name__ == "__main__":
    main()
