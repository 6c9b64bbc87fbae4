"""What the supervisor itself costs: its share of a core beside a job, and its start-up.

    python benchmarks/own_cost.py [--seconds 8] [--runs 3]

The CPU share is that of the whole supervisor process with all of its threads, once its first
seconds are over, beside a job that publishes 32 metrics a frame at a fixed rate and does nothing
else. The start-up is the time from `supervise` to the first instruction of the job, beside that of
`python -c pass`. Each number is the least of its runs: whatever else the machine does only adds.
Cold means that the files that Python reads were dropped from the page cache, as far as the kernel
agrees to it. Linux only.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SETTLE_S = 4.0  # until the first look at the machine and the first seconds are over
RATES = (0, 20, 160)  # frames per second
HERE = Path(__file__).resolve()
SUPERVISE = [sys.executable, "-m", "supervise"]


def job(rate: int, seconds: float) -> None:
    """Publish `rate` frames a second into the segment of the run that this process belongs to."""
    from supervise_probe.config import load
    from supervise_probe.ipc.segment import Writer

    config = load(os.environ["SUPERVISE_PROBE"])
    writer = Writer.create(config.shm, config.run, 0, 1, config.slots, config.capacity)
    names = ["train_loss_raw", "grad_global_norm", *(f"metric_{i:02d}" for i in range(30))]
    writer.announce(names)
    values = [1.0] * len(names)
    began = time.monotonic_ns()
    step = 0
    while (now := time.monotonic_ns()) < began + seconds * 1e9:
        writer.beat(now, 1)
        if not rate:
            time.sleep(0.25)
            continue
        values[2] = float(step % 7)
        writer.publish(step, 0, values, now)
        step += 1
        time.sleep(max(0.0, (began + step * 1_000_000_000 // rate - time.monotonic_ns()) / 1e9))
    writer.last_words(0, "")
    writer.close()


def cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads that a process has now."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except OSError:  # it has just ended
            continue
    return total


def cpu_share(rate: int, seconds: float) -> float:
    """Return the supervisor's share of a core beside a job of that many frames a second."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE), "--job", str(rate), str(SETTLE_S + seconds + 30)]
        supervisor = subprocess.Popen(
            [*SUPERVISE, "-q", "--", *command], cwd=folder, stderr=subprocess.DEVNULL
        )
        try:
            time.sleep(SETTLE_S)
            before, at_ns = cpu_ns(supervisor.pid), time.monotonic_ns()
            time.sleep(seconds)
            used, took = cpu_ns(supervisor.pid) - before, time.monotonic_ns() - at_ns
        finally:
            supervisor.terminate()
            supervisor.wait()
    return used / took


def until_job_s() -> float:
    """Return the time from the start of `supervise` until its job runs."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time_ns()
        command = [*SUPERVISE, "-q", "--policy", "nano", "--", "date", "+%s%N"]
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True)
        return (int(done.stdout) - began) / 1e9


def bare_python_s() -> float:
    """Return how long `python -c pass` takes."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.monotonic() - began


def drop_from_page_cache() -> None:
    """Let the kernel forget the files of Python, of its packages and of this project."""
    os.sync()
    import supervise

    roots = {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")}
    for root in (*roots, str(Path(supervise.__file__).parents[2])):
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in ("torch", ".git", "runs")]
            for name in names:
                if not name.endswith((".py", ".pyc", ".so", ".yaml", ".txt", "METADATA")):
                    continue
                try:
                    fd = os.open(os.path.join(folder, name), os.O_RDONLY)  # noqa: PTH118
                except OSError:
                    continue
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


def cold(measure: Callable[[], float]) -> float:
    """Measure with the files dropped from the page cache first."""
    drop_from_page_cache()
    return measure()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--job", nargs=2, metavar=("RATE", "SECONDS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(int(args.job[0]), float(args.job[1]))
        return
    load = os.getloadavg()[0]
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {load:.1f}\n")
    print(f"{'share of a core':24}{'least of ' + str(args.runs):>12}")
    for rate in RATES:
        share = min(cpu_share(rate, args.seconds) for _ in range(args.runs))
        print(f"{f'{rate} frames/s' if rate else 'no frames':24}{share:12.2%}", flush=True)
    print(f"\n{'start-up':24}{'python':>12}{'supervise':>12}{'difference':>12}")
    runs = 5 * args.runs
    until_job_s()
    for name, take in (("warm", lambda measure: measure()), ("cold", cold)):
        bare, ours = (
            min(take(measure) for _ in range(runs if name == "warm" else args.runs))
            for measure in (bare_python_s, until_job_s)
        )
        row = "".join(f"{value * 1e3:9.0f} ms" for value in (bare, ours, ours - bare))
        print(f"{name:24}{row}", flush=True)


if __name__ == "__main__":
    main()
