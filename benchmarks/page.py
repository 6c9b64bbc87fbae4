"""The price of the page: build, memory, answers and live views, beside the limits of its design.

    python benchmarks/page.py --rows 1e4,1e5,1e6     # 10**6 steps of 64 metrics need 0.6 GB of disk
    python benchmarks/page.py --alone                # what an open page costs a training; 5 minutes

Times of the server are CPU times of its process, so that other work on the machine counts less.
TensorBoard serves the same rows up to 10**5 in the same run; without the package `tensorboard` its
lines say so.

`--alone`: a page is open and live by turns beside a training of the example. The cost is the CPU
time of job and supervisor a step with the page over that without, the median over pairs of turns;
its interval is a bootstrap over the pairs. Exits with 1 above a limit.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import psutil

from supervise.core.model import Announced, Launched, Policy
from supervise.store import RunDir, pack_event

ROOT = Path(__file__).parents[1]
METRICS = 64
START, START_MEMORY = "start to first curve, s wall", "memory then, MB"
TENSORBOARD, TENSORBOARD_MEMORY = "  of TensorBoard, s wall", "  of TensorBoard, MB"
LIMITS = {  # at the largest number of rows; milliseconds, seconds, MB, kB
    START: None,
    TENSORBOARD: None,
    START_MEMORY: None,
    TENSORBOARD_MEMORY: None,
    "first answer, ms CPU": 300,
    "build, s": 8,
    "memory, MB": 200,
    "opening with cache, ms CPU": 700,
    "12 metrics, worst window, ms CPU": 100,
    "12 metrics, worst window, kB": 700,
    "run document, kB": 60,
    "live view, ms CPU a second": 10,  # half of it for the curves and the status
    "live view, kB a second": 10,
    "export, kB": 1000,
}
COMPARED_ROWS = 100_000  # its events of more rows take minutes to write
WARM = 100  # steps, before the first turn
MORE = 0.005  # CPU time of job and supervisor that an open page may cost
LEG, TURNS = 30, 40  # steps of a turn, a tenth of a second each; pairs of turns
DRAWS = 4000
RECORD = struct.Struct("<IIIB")
NAMES = (
    *("train_loss_raw", "train_loss_ema", "grad_global_norm", "update_norm", "update_to_weight"),
    *("learning_rate", "tokens_per_sec", "step_time", "forward_time", "backward_time"),
    *("optimizer_time", "other_time", "tokens_seen", "host_mem_used", "probe_overhead_frac"),
    *("max_attn_logit", "attn_entropy", "fixed_probe_loss", "batch_token_entropy"),
)
ALL_NAMES = (*NAMES, *(f"residual_rms.{layer}" for layer in range(METRICS - len(NAMES))))


def rows_of(rows: int) -> Iterator[tuple[int, Any]]:
    """Yield the steps with their metrics."""
    chance = np.random.default_rng(0)
    for begin in range(0, rows, 10_000):
        steps = np.arange(begin, min(rows, begin + 10_000))
        values = chance.standard_normal((len(steps), METRICS)) * 0.1 + 1
        noise = chance.standard_normal(len(steps)) * 0.06
        values[:, 0] = 2 + 9 * np.exp(-18 * steps / rows) + noise
        values[:, NAMES.index("tokens_seen")] = (steps + 1) * 768.0
        values[chance.integers(0, len(steps), 2), 0] += 2.5
        yield from zip(steps.tolist(), values, strict=True)


def write_run(path: Path, rows: int) -> RunDir:
    """Write a run of so many steps with one rollback, and spikes that no picture may lose."""
    policy = Policy("quiet", "sha256:0", "observe", {}, (), resolved="policy: quiet\n")
    wall = "2026-01-05T10:11:12.345Z"
    run = RunDir.create(path, argv=["python", "train.py"], policy=policy, wall=wall)
    journal = Writer(run.journal_path)
    journal.put(*pack_event(Launched(1, 7, 0)))
    journal.put(*pack_event(Announced(2, 0, 1, 7, tuple(ALL_NAMES))))
    bits, cut = ((1 << METRICS) - 1).to_bytes(8, "little"), rows * 6 // 10
    head = struct.Struct("<qqIIH")
    for step, row in rows_of(rows):
        at_ns, attempt = 2_000_000_000_000 + step * 50_000_000, int(step >= cut)
        journal.put(1, head.pack(at_ns, step, 0, attempt, METRICS) + bits + row.tobytes())
    journal.close()
    state = {"state": "nominal", "step": rows - 1, "updated_wall": wall}
    (run.path / "state.json").write_text(json.dumps(state))
    launch = {"attempt": 0, "pid": 2**22 + 7, "start_ticks": 1}
    (run.path / "launch.json").write_text(json.dumps(launch))
    run.audit_path.touch()
    return run


class Writer:
    """Writes segments as the supervisor does, without its checks."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._segment, self._number = directory, 0, 0
        self._open()

    def _open(self) -> None:
        self._file = (self._directory / f"{self._segment:05}.jrn").open("wb")
        self._file.write(struct.pack("<8sQ", b"SUPVJRN1", self._number))

    def put(self, kind: int, payload: bytes) -> None:
        """Write one record."""
        if self._file.tell() >= 64 << 20:
            self._file.close()
            self._segment += 1
            self._open()
        body = struct.pack("<IB", self._number, kind) + payload
        self._file.write(struct.pack("<II", len(payload), zlib.crc32(body)) + body)
        self._number += 1

    def flush(self) -> None:
        """Let readers see it."""
        self._file.flush()

    def close(self) -> None:
        """End the journal."""
        self._file.close()


class Server:
    """A server as a process, with the children that it starts, and its costs."""

    def __init__(self, command: Sequence[str | Path]) -> None:
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        address = None
        while address is None and (line := self.process.stderr.readline()):
            address = re.search(r"http://[\w.]+:\d+", line)
        assert address, command
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self.http = httpx.Client(base_url=address[0], timeout=120)

    def cpu_s(self) -> float:
        """CPU time so far."""
        return cpu_s(self.process.pid)

    def memory_mb(self) -> float:
        """Resident memory now, without pages of files."""
        texts = (Path(f"/proc/{p.pid}/status").read_text() for p in tree(self.process.pid))
        sizes = (re.search(r"RssAnon:\s+(\d+)", text) for text in texts)
        return sum(int(size[1]) for size in sizes if size) / 1e3

    def close(self) -> None:
        """End it."""
        self.http.close()
        for process in reversed(tree(self.process.pid)):
            process.terminate()
        self.process.wait()


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def cpu_s(pid: int) -> float:
    """Return the CPU time so far of a process and its descendants."""
    times = (process.cpu_times() for process in tree(pid))
    return float(sum(each.user + each.system for each in times))


def serve_page(home: Path) -> Server:
    """Return the page over the runs."""
    options = ("--no-token", "--cache", home / "cache")
    return Server([sys.executable, "-m", "supervise", "web", home / "runs", *options])


def measure(rows: int, home: Path) -> dict[str, float]:
    """Return the costs of a run of so many rows."""
    run = write_run(home / "runs" / f"r{rows}", rows)
    costs: dict[str, float] = {}
    begin = time.monotonic()
    server = serve_page(home)
    try:
        path, before = f"/api/run/{run.path.name}", server.cpu_s()
        server.http.get("/api/runs")
        costs["first answer, ms CPU"] = 1e3 * (server.cpu_s() - before)
        before = server.cpu_s()
        wait_for(server, path)
        costs["build, s"] = server.cpu_s() - before
        costs[START] = time.monotonic() - begin
        costs[START_MEMORY] = server.memory_mb()
        times, sizes = zip(*windows(server, path, rows), strict=True)
        costs["12 metrics, worst window, ms CPU"] = max(times)
        costs["12 metrics, worst window, kB"] = max(sizes)
        costs["run document, kB"] = len(server.http.get(path).content) / 1e3
        costs["export, kB"] = (
            len(server.http.get(f"/run/{run.path.name}/export.html").content) / 1e3
        )
        costs["memory, MB"] = server.memory_mb()
        cpu, size = watch(server, path, run)
        costs["live view, ms CPU a second"], costs["live view, kB a second"] = cpu, size
    finally:
        server.close()
    server = serve_page(home)
    try:
        before = server.cpu_s()
        server.http.get(f"/run/{run.path.name}/")
        server.http.get(path)
        wait_for(server, path)
        costs["opening with cache, ms CPU"] = 1e3 * (server.cpu_s() - before)
    finally:
        server.close()
    return costs


def wait_for(server: Server, path: str) -> None:
    """Return when the curves are built."""
    while server.http.get(f"{path}/series", params={"m": NAMES[0]}).status_code == 202:
        time.sleep(0.05)


def windows(server: Server, path: str, rows: int) -> list[tuple[float, float]]:
    """Return CPU milliseconds and kB of windows of all sizes."""
    costs = []
    for share, width in ((0.0, rows), (0.4, rows * 0.2), (0.5, 3000), (0.5, 300)):
        low = rows * share
        query = {"m": NAMES[:12], "lo": low, "hi": low + width, "px": 1000}
        before, count, size = server.cpu_s(), 20, 0
        for _ in range(count):
            size = len(server.http.get(f"{path}/series", params=query).content)
        costs.append((1e3 * (server.cpu_s() - before) / count, size / 1e3))
    return costs


class Viewer:
    """An open page, without its pictures: it hears events, and asks for what is new of 12 curves.

    Attributes:
        size: bytes that it got so far.
    """

    def __init__(self, server: Server, path: str) -> None:
        self._server, self._path = server, path
        self._following, self.size = 0, 0
        self._over = threading.Event()
        work = (self._hear, self._ask)
        self._threads = [threading.Thread(target=each, daemon=True) for each in work]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._over.is_set():
            query = {"m": NAMES[:12], "px": 1000, "from": self._following}
            raw = self._server.http.get(f"{self._path}/series", params=query).content
            self.size += len(raw)
            self._following = int(json.loads(raw[4 : 4 + struct.unpack_from("<I", raw)[0]])["next"])
            self._over.wait(2)

    def _hear(self) -> None:
        with self._server.http.stream("GET", f"{self._path}/live") as answer:
            for chunk in answer.iter_raw():
                self.size += len(chunk)
                if self._over.is_set():
                    return

    def close(self) -> None:
        """Close the page."""
        self._over.set()
        for thread in self._threads:
            thread.join(30)


def watch(server: Server, path: str, run: RunDir, seconds: float = 10.0) -> tuple[float, float]:
    """Return CPU milliseconds and kB a second of a viewer while 20 frames a second are written.

    As a supervisor does, the status is written every 3 s.
    """
    newest = sorted(run.journal_path.glob("*.jrn"))[-1]
    viewer = Viewer(server, path)
    time.sleep(5)  # it has what was there
    before, viewer.size, begin = server.cpu_s(), 0, time.monotonic()
    written_s = begin
    with newest.open("ab") as file, run.audit_path.open() as log:
        fcntl.flock(log, fcntl.LOCK_EX)  # as its supervisor has it
        number = 1 << 30
        step = 10**7
        while time.monotonic() - begin < seconds:
            payload = struct.pack("<qqIIH", 10**14 + step, step, 0, 9, 4) + b"\x0f" + bytes(32)
            body = struct.pack("<IB", number, 1) + payload
            file.write(struct.pack("<II", len(payload), zlib.crc32(body)) + body)
            file.flush()
            number, step = number + 1, step + 1
            if time.monotonic() - written_s > 3:
                status = json.loads((run.path / "state.json").read_text())
                (run.path / "state.json").write_text(json.dumps({**status, "step": step}))
                written_s = time.monotonic()
            time.sleep(0.05)
        took_s = time.monotonic() - begin
        costs = 1e3 * (server.cpu_s() - before) / took_s, viewer.size / 1e3 / took_s
        viewer.close()
    return costs


# ── TensorBoard ──


def write_events(folder: Path, rows: int) -> None:
    """Write the rows as TensorBoard's own writer does."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir()
    with (folder / "events.out.tfevents.1").open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=0.0, file_version="brain.Event:2").SerializeToString())
        for step, row in rows_of(rows):
            pairs = zip(ALL_NAMES, row.tolist(), strict=True)
            values = [Summary.Value(tag=name, simple_value=value) for name, value in pairs]
            event = Event(wall_time=step * 0.05, step=step, summary=Summary(value=values))
            writer.write(event.SerializeToString())
        writer.flush()


def measure_tensorboard(rows: int, home: Path) -> dict[str, float]:
    """Return how long TensorBoard takes to the first whole curve, and its memory then."""
    if importlib.util.find_spec("tensorboard") is None or rows > COMPARED_ROWS:
        return {}
    write_events(home / "events", rows)
    begin = time.monotonic()
    options = ("--logdir", home / "events", "--port", "0")
    server = Server([sys.executable, "-m", "tensorboard.main", *options])
    query = {"run": ".", "tag": NAMES[0]}
    try:
        while True:
            answer = server.http.get("/data/plugin/scalars/scalars", params=query)
            if answer.status_code == 200 and answer.json()[-1][1] == rows - 1:
                break
            time.sleep(0.05)
        return {
            TENSORBOARD: time.monotonic() - begin,
            TENSORBOARD_MEMORY: server.memory_mb(),
        }
    finally:
        server.close()
        shutil.rmtree(home / "events")


# ── beside a training ──


def measure_training(home: Path, turns: int) -> bool:
    """Print what an open page costs job and supervisor; return whether that is too much."""
    run = home / "runs" / "live"
    train = (ROOT / "examples/nano/train.py", "--steps", "1000000", "--log-every", "1")
    options = ("-q", "--run-dir", run, "-p", "nano", "--")
    command = [sys.executable, "-m", "supervise", *options, sys.executable, *train]
    command += ["--out", str(home / "out")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    lines = (line for line in job.stdout if line.startswith("step"))  # one a step
    server = None
    pairs: list[dict[bool, float]] = []
    try:
        deque(islice(lines, WARM), maxlen=0)
        server = serve_page(home)
        wait_for(server, "/api/run/live")
        for pair in range(turns):
            costs = {}
            for is_open in (pair % 2 == 0, pair % 2 == 1):
                viewer = Viewer(server, "/api/run/live") if is_open else None
                next(lines)
                used = cpu_s(job.pid)
                deque(islice(lines, LEG), maxlen=0)
                costs[is_open] = (cpu_s(job.pid) - used) / LEG
                if viewer is not None:
                    viewer.close()
            pairs.append(costs)
    finally:
        if server is not None:
            server.close()
        job.terminate()
        job.wait()
    ratios = [costs[True] / costs[False] for costs in pairs]
    draw = random.Random(0)
    drawn = sorted(median(draw.choices(ratios, k=turns)) for _ in range(DRAWS))
    low, high = drawn[int(0.025 * DRAWS)], drawn[int(0.975 * DRAWS)]
    limit = 1.0 + MORE
    verdict = "PASS" if high <= limit else "FAIL" if low > limit else "inconclusive"
    usual_ms = 1e3 * median(costs[False] for costs in pairs)
    print(
        f"job and supervisor, CPU a step: {usual_ms:.1f} ms; with an open page "
        f"x{median(ratios):.4f}  {low:.4f} .. {high:.4f} in {turns} pairs, "
        f"limit {limit}: {verdict}"
    )
    return verdict == "FAIL"


def print_table(counts: Sequence[int], columns: Sequence[dict[str, float]]) -> bool:
    """Print the costs of runs of so many rows; return whether one of the last is above a limit."""
    print(f"{'':32}{'limit':>8}" + "".join(f"{count:>15}" for count in counts))
    is_worse = False
    for name, limit in LIMITS.items():
        cells = []
        for count, column in zip(counts, columns, strict=True):
            absent = "not installed" if count <= COMPARED_ROWS else "not run"
            cells.append(f"{column[name]:.1f}" if name in column else absent)
        is_worse |= limit is not None and columns[-1][name] > limit
        print(f"{name:32}{limit or '':>8}" + "".join(f"{cell:>15}" for cell in cells))
    return is_worse


def main() -> int:
    """Print the costs; return 1 above a limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1e4,1e5")
    parser.add_argument("--alone", action="store_true", help="the cost of an open page only")
    parser.add_argument("--turns", type=int, default=TURNS, help="pairs, with --alone")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="supervise-page-"))
    try:
        if options.alone:
            return int(measure_training(home, options.turns))
        counts = [int(float(text)) for text in options.rows.split(",")]
        columns = [measure(count, home) | measure_tensorboard(count, home) for count in counts]
    finally:
        shutil.rmtree(home)
    return int(print_table(counts, columns))


if __name__ == "__main__":
    sys.exit(main())
