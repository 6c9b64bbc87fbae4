"""The cost for the training thread of one frame of 32 metrics, per logger.

`python benchmarks/publish.py NAME` measures one logger in a process of its own and prints JSON;
`overhead.py` calls it. Between two frames the caches are filled with other things for some
milliseconds, as a training step does: a logger in a tight loop looks ten times cheaper than it is.
Every logger gets the same dict of floats and must have let go of it when the call returns.

`python benchmarks/publish.py --stream RATE SECONDS`, as a job under `supervise`, publishes RATE
frames a second and nothing else.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

METRICS = [f"group_{i // 8}/metric_{i:02d}" for i in range(32)]
FRAMES = 300
WARM_UP = 30
STREAMED = 24 << 20  # bytes copied between frames; larger than the caches of most machines

Log = Callable[[int, dict[str, float]], object]


@contextmanager
def nothing(_: Path) -> Iterator[Log]:
    """The harness itself."""
    yield lambda step, values: None


@contextmanager
def supervise(_: Path) -> Iterator[Log]:
    """The probe's writer: one checksummed slot in shared memory."""
    from supervise_probe.ipc.segment import Writer

    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="supervise-bench-") as folder:
        writer = Writer.create(folder, "bench", 0, 1)
        writer.announce(METRICS)

        def log(step: int, values: dict[str, float]) -> None:
            now = time.monotonic_ns()
            writer.publish(step, 0, [values[name] for name in METRICS], now)

        yield log
        writer.close()


@contextmanager
def json_line(folder: Path) -> Iterator[Log]:
    """One line of JSON in a file, flushed."""
    with (folder / "log.jsonl").open("w", encoding="utf-8") as file:

        def log(step: int, values: dict[str, float]) -> None:
            file.write(json.dumps({"step": step, **values}) + "\n")
            file.flush()

        yield log


@contextmanager
def prometheus(_: Path) -> Iterator[Log]:
    """32 gauges of prometheus_client, created in advance."""
    from prometheus_client import CollectorRegistry, Gauge

    registry = CollectorRegistry()
    gauges = {n: Gauge(n.replace("/", "_"), n, registry=registry) for n in METRICS}

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            gauges[name].set(value)

    yield log


@contextmanager
def tensorboard(folder: Path) -> Iterator[Log]:
    """32 scalars through torch.utils.tensorboard."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:

        def log(step: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        yield log


@contextmanager
def wandb_offline(folder: Path) -> Iterator[Log]:
    """One `log` call of wandb in offline mode."""
    import wandb

    settings = wandb.Settings(silent=True, x_disable_stats=True)
    run = wandb.init(project="bench", dir=str(folder), mode="offline", settings=settings)
    yield lambda step, values: run.log(values, step=step)
    run.finish()


@contextmanager
def mlflow_file(folder: Path) -> Iterator[Log]:
    """One `log_metrics` call of MLflow, with its store in a local file."""
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # a database needs more than mlflow-skinny
    import mlflow

    mlflow.set_tracking_uri(folder.as_uri())
    mlflow.set_experiment("bench")
    with mlflow.start_run():
        yield lambda step, values: mlflow.log_metrics(values, step=step)


LOGGERS = {
    "nothing (the harness)": nothing,
    "supervise probe": supervise,
    "JSONL line": json_line,
    "prometheus gauges": prometheus,
    "TensorBoard": tensorboard,
    "wandb offline": wandb_offline,
    "MLflow": mlflow_file,
}


def cpu_of_all_s() -> float:
    """Return the CPU time of this process with all threads, and of its ended children."""
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def percentile(values: list[float], share: float) -> float:
    """Return the value below which `share` of them lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(name: str) -> dict[str, float]:
    """Return microseconds per frame: CPU of the calling thread, wall, CPU of everything."""
    source = bytearray(STREAMED)
    values = dict.fromkeys(METRICS, 0.0)
    cpu, wall, streaming = [], [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        before_all = cpu_of_all_s()
        with LOGGERS[name](Path(folder)) as log:
            for step in range(FRAMES + WARM_UP):
                if step == WARM_UP:
                    before_all, streaming = cpu_of_all_s(), 0.0
                    cpu.clear()
                    wall.clear()
                before = time.thread_time_ns()
                bytes(source)
                for i, metric in enumerate(METRICS):
                    values[metric] = step + i / 7
                streaming += time.thread_time_ns() - before
                at, used = time.perf_counter_ns(), time.thread_time_ns()
                log(step, values)
                cpu.append((time.thread_time_ns() - used) / 1e3)
                wall.append((time.perf_counter_ns() - at) / 1e3)
        total = (cpu_of_all_s() - before_all) * 1e6 - streaming / 1e3
    return {
        "cpu_p50": percentile(cpu, 0.5),
        "cpu_p99": percentile(cpu, 0.99),
        "wall_p50": percentile(wall, 0.5),
        "wall_p99": percentile(wall, 0.99),
        "all": max(0.0, total / FRAMES),
    }


def stream(rate: int, seconds: int) -> None:
    """Publish into the segment of the run that this process belongs to."""
    from supervise_probe.context import read_config
    from supervise_probe.ipc.segment import Writer

    config = read_config(os.environ["SUPERVISE_PROBE"])
    writer = Writer.create(config.shm, config.run, 0, 1, config.slots, config.capacity)
    writer.announce(METRICS)
    values = [0.0] * len(METRICS)
    began = time.monotonic_ns()
    for step in range(rate * seconds):
        time.sleep(max(0.0, (began + step * 1_000_000_000 // rate - time.monotonic_ns()) / 1e9))
        now = time.monotonic_ns()
        values[0] = float(step)
        writer.publish(step, 0, values, now)
        writer.write_heartbeat(now, 1)
    writer.write_end(0, "")
    writer.close()


def main() -> None:
    """Measure the logger named on the command line; exit code 3 when it is not installed."""
    if sys.argv[1] == "--stream":
        stream(*map(int, sys.argv[2:4]))
        return
    os.environ["WANDB_SILENT"] = "true"
    try:
        print(json.dumps(measure(sys.argv[1])))
    except ModuleNotFoundError as error:
        print(f"not installed: {error.name}", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
