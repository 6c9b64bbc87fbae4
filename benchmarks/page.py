"""The price of the page: build, memory, answers and live views, beside the limits of its design.

    python benchmarks/page.py --rows 1e4,1e5,1e6     # 10**6 steps of 64 metrics need 0.6 GB of disk

Times of the server are CPU times of its process, so that other work on the machine counts less.
Exits with 1 above a limit.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

import httpx
import numpy as np

from supervise.core.model import Announced, Launched, Policy
from supervise.store import RunDir, pack_event

METRICS = 64
LIMITS = {  # at the largest number of rows; milliseconds, seconds, MB, kB
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
TICKS = os.sysconf("SC_CLK_TCK")
RECORD = struct.Struct("<IIIB")
NAMES = (
    *("train_loss_raw", "train_loss_ema", "grad_global_norm", "update_norm", "update_to_weight"),
    *("learning_rate", "tokens_per_sec", "step_time", "forward_time", "backward_time"),
    *("optimizer_time", "other_time", "tokens_seen", "host_mem_used", "probe_overhead_frac"),
    *("max_attn_logit", "attn_entropy", "fixed_probe_loss", "batch_token_entropy"),
)


def write_run(path: Path, rows: int) -> RunDir:
    """Write a run of so many steps with one rollback, and spikes that no picture may lose."""
    policy = Policy("quiet", "sha256:0", "observe", {}, (), resolved="policy: quiet\n")
    wall = "2026-01-05T10:11:12.345Z"
    run = RunDir.create(path, argv=["python", "train.py"], policy=policy, wall=wall)
    names = [*NAMES, *(f"residual_rms.{layer}" for layer in range(METRICS - len(NAMES)))]
    chance = np.random.default_rng(0)
    journal = Writer(run.journal_path)
    journal.put(*pack_event(Launched(1, 7, 0)))
    journal.put(*pack_event(Announced(2, 0, 1, 7, tuple(names))))
    bits, cut = ((1 << METRICS) - 1).to_bytes(8, "little"), rows * 6 // 10
    head = struct.Struct("<qqIIH")
    for begin in range(0, rows, 10_000):
        steps = np.arange(begin, min(rows, begin + 10_000))
        values = chance.standard_normal((len(steps), METRICS)) * 0.1 + 1
        values[:, 0] = (
            2 + 9 * np.exp(-18 * steps / rows) + chance.standard_normal(len(steps)) * 0.06
        )
        values[:, NAMES.index("tokens_seen")] = (steps + 1) * 768.0
        values[chance.integers(0, len(steps), 2), 0] += 2.5
        for step, row in zip(steps.tolist(), values, strict=True):
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
    """`supervise web` as a process, and its costs."""

    def __init__(self, runs: Path, cache: Path) -> None:
        command = [sys.executable, "-m", "supervise", "web", runs, "--no-token", "--cache", cache]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        match = re.search(r"http://[\d.:]+", line)
        assert match, line
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self.http = httpx.Client(base_url=match[0], timeout=120)

    def cpu_s(self) -> float:
        """CPU time of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory_mb(self) -> float:
        """Its resident memory now, without pages of files."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        match = re.search(r"RssAnon:\s+(\d+)", text)
        return int(match[1]) / 1e3 if match else 0.0

    def close(self) -> None:
        """End it."""
        self.http.close()
        self.process.terminate()
        self.process.wait()


def measure(rows: int, home: Path) -> dict[str, float]:
    """Return the costs of a run of so many rows."""
    run = write_run(home / "runs" / f"r{rows}", rows)
    costs: dict[str, float] = {}
    server = Server(home / "runs", home / "cache")
    try:
        path, before = f"/api/run/{run.path.name}", server.cpu_s()
        server.http.get("/api/runs")
        costs["first answer, ms CPU"] = 1e3 * (server.cpu_s() - before)
        before = server.cpu_s()
        wait_for(server, path)
        costs["build, s"] = server.cpu_s() - before
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
    server = Server(home / "runs", home / "cache")
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


def watch(server: Server, path: str, run: RunDir, seconds: float = 10.0) -> tuple[float, float]:
    """Return CPU milliseconds and kB a second of a viewer while 20 frames a second are written.

    As a page does, it hears events and asks for what is new of 12 curves every 2 s; as a supervisor
    does, the status is written every 3 s.
    """
    newest = sorted(run.journal_path.glob("*.jrn"))[-1]
    query = {"m": NAMES[:12], "px": 1000}
    following, size, over = 0, 0, threading.Event()

    def ask() -> None:
        nonlocal following, size
        raw = server.http.get(f"{path}/series", params={**query, "from": following}).content
        size += len(raw)
        following = int(json.loads(raw[4 : 4 + struct.unpack_from("<I", raw)[0]])["next"])

    def hear() -> None:
        nonlocal size
        with server.http.stream("GET", f"{path}/live") as answer:
            for chunk in answer.iter_raw():
                size += len(chunk)
                if over.is_set():
                    return

    listener = threading.Thread(target=hear, daemon=True)
    listener.start()
    time.sleep(3)
    ask()
    before, size, begin = server.cpu_s(), 0, time.monotonic()
    asked_s = written_s = begin
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
            if time.monotonic() - asked_s > 2:
                ask()
                asked_s = time.monotonic()
            if time.monotonic() - written_s > 3:
                status = json.loads((run.path / "state.json").read_text())
                (run.path / "state.json").write_text(json.dumps({**status, "step": step}))
                written_s = time.monotonic()
            time.sleep(0.05)
    took_s = time.monotonic() - begin
    costs = 1e3 * (server.cpu_s() - before) / took_s, size / 1e3 / took_s
    over.set()
    listener.join(30)
    return costs


def main() -> int:
    """Print the table; return 1 above a limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1e4,1e5")
    counts = [int(float(text)) for text in parser.parse_args().rows.split(",")]
    home = Path(tempfile.mkdtemp(prefix="supervise-page-"))
    try:
        columns = [measure(count, home) for count in counts]
    finally:
        shutil.rmtree(home)
    print(f"{'':32}{'limit':>8}" + "".join(f"{count:>12}" for count in counts))
    worst = 0
    for name, limit in LIMITS.items():
        values = [column[name] for column in columns]
        worst |= values[-1] > limit
        print(f"{name:32}{limit:>8}" + "".join(f"{value:>12.1f}" for value in values))
    return int(worst)


if __name__ == "__main__":
    sys.exit(main())
