"""The machine under the job: devices by NVML, memory, files and disk by psutil, once a few seconds.

A driver may block for seconds, so a thread of its own asks it and the loop reads the last answer. A
value that the machine does not have is absent; a question that fails twice in a row is not
repeated before the next launch, and the reason is reported. Each device is a question of its own: a
lost one hides no other. Sources: NVML device queries (those of `nvidia-smi`); psutil.

The job's own memory is the resident size of its processes less shared pages. Memory in use that is
shared (files in /dev/shm, batches that a DataLoader hands over) is not counted; pages that a forked
child shares with its parent count in both, so workers that start look like growth.

The growth of that memory is a lower bound, the greater one of two windows. A window has four parts
of equal length, and each part a level. The rise of a part is its level less that of the part
before. The bound is the least of the three rises, less 10 times the difference of the first and the
last, per time, and 0 at least. So a jump is no growth, nor are sizes that go up and down, nor is a
curve that flattens out.

The short window is for memory that fills the machine soon: 16 looks; the level is the median of a
part. 4 times the scatter (the mean distance from the least-squares line, some 3 standard deviations
of normal noise) is taken off too, and the last rise may be one scatter below the first. The least
of the newest 4 bounds counts. It is 0 unless the second part is above everything before the window,
and unless the free memory of the machine would be used up within two hours at that rate: loaders,
caches and buffers fill quickly too, and stop.

The slow window has the lowest size in each of 40 minutes; the level is the lowest of a part. A
save, an evaluation or a buffer that is freed leaves it as it was. A peak of minutes at the
beginning of a part hides growth for a time; memory that fills steadily for 40 minutes before it is
freed looks like growth. Looks from before the first step, and 5 behind it, are left out, since the
model is loaded and compiled then.

Blind to: growth in steps more than 10 minutes apart; growth of the short window below an earlier
peak; the limit of a container. All numbers are project defaults.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from ..system import Thread

SETTLE = 5  # looks after the first step
WINDOW = 16  # looks: half a minute at one in two seconds
STEADY = 4  # bounds of the short window, of which the least counts
FIRST = SETTLE + WINDOW + STEADY - 1  # looks from the first step to the first bound
SOON_S = 7200.0  # project default: until a machine is full; the slow window is well within it
MINUTE_S, MINUTES = 60.0, 40
PARTS = 4
LEVEL = 5  # looks: a size that lasts shorter, as in a save, is not what there was before
SCATTER = 4.0  # mean distances from the line
SLOWING = 10.0  # times what the last rise is below the first

Points = Sequence[tuple[float, float]]  # seconds, bytes


class MemoryGrowth:
    """The newest sizes of one job, since it settled."""

    def __init__(self) -> None:
        self._sizes: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._before: deque[float] = deque(maxlen=WINDOW)  # highest level before each look
        self._highest = 0.0
        self._quick: deque[float] = deque(maxlen=STEADY)  # newest bounds of the short window
        self._lowest: deque[tuple[float, float]] = deque(maxlen=MINUTES)  # begin, size
        self._available = 0.0
        self._settling = SETTLE

    def add(self, at_s: float, size: float, available: float) -> None:
        """The job has begun its steps; at `at_s` it had `size` bytes, the machine some left."""
        if self._settling:
            self._settling -= 1
            return
        self._available = available
        self._before.append(self._highest)
        self._sizes.append((at_s, size))
        level = median(y for _, y in islice(reversed(self._sizes), LEVEL))
        self._highest = max(self._highest, level)
        if len(self._sizes) == WINDOW:
            self._quick.append(short_window_rise_bound(list(self._sizes), level=self._before[0]))
        if not self._lowest or at_s - self._lowest[-1][0] >= MINUTE_S:
            self._lowest.append((at_s, size))
        else:
            began, lowest = self._lowest[-1]
            self._lowest[-1] = began, min(lowest, size)

    def lower_bound(self) -> float | None:
        """Return bytes a second that the job grows by at least; None in the first `FIRST` looks."""
        if len(self._quick) < STEADY:
            return None
        fast = min(self._quick)
        dangerous = fast > 0.0 and fast * SOON_S >= self._available
        slow = slow_window_rise_bound(list(self._lowest)) if len(self._lowest) == MINUTES else 0.0
        return max(fast if dangerous else 0.0, slow)


def short_window_rise_bound(points: Points, level: float) -> float:
    """Return the bound of the short window; 0.0 unless its second part is above `level`."""
    levels = [median(y for _, y in part) for part in split_window(points)]
    return (
        least_rise(levels, residual_scatter(points), part_spacing(points))
        if levels[1] > level
        else 0.0
    )


def slow_window_rise_bound(points: Points) -> float:
    """Return the bound of the slow window, of the lowest size in each minute."""
    levels = [min(y for _, y in part) for part in split_window(points)]
    return least_rise(levels, 0.0, part_spacing(points))


def least_rise(levels: Sequence[float], noise: float, apart_s: float) -> float:
    """Return the least rise a second, less noise and slowing; 0.0 for a clock that stands."""
    if apart_s <= 0.0:
        return 0.0
    rises = [level - previous_level for previous_level, level in pairwise(levels)]
    slowing = max(0.0, rises[0] - rises[-1] - noise)
    return max(0.0, min(rises) - SCATTER * noise - SLOWING * slowing) / apart_s


def split_window(points: Points) -> list[Points]:
    """Return the window in parts of as many points each."""
    size = len(points) // PARTS
    return [points[i * size : (i + 1) * size] for i in range(PARTS)]


def part_spacing(points: Points) -> float:
    """Return the seconds from one part to the next, on average."""
    return (split_window(points)[-1][0][0] - points[0][0]) / (PARTS - 1)


def residual_scatter(points: Points) -> float:
    """Return the mean distance of y from its least-squares line over x, in units of y."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    tilt = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    return sum(abs(y - mean_y - tilt * (x - mean_x)) for x, y in points) / len(points)


_log = logging.getLogger(__name__)
EVERY_S = 2.0  # between two looks
MEMBERS_S = 10.0  # between two searches for the processes of the job, which read all of /proc
STALE_S = 30.0  # an answer older than that is no answer
STRIKES = 2
# The last answer of a device that fails stands in for so long: a driver that fails for a moment
# must not make a job idle that works on its devices only, nor a lost one keep it busy for ever.
ANSWER_S = 60.0
RETRIES = 6  # of what has failed, in that time
ELSEWHERE = 0  # stands for pids of another namespace: in a container the driver tells the host's

HOST = ("host_mem_used", "host_mem_growth", "host_cpu_wait", "open_files", "disk_free")
DEVICE = (
    *("gpu_util", "gpu_mem_used", "gpu_temperature", "gpu_power", "gpu_ecc_errors"),
    "gpu_xid_errors",
)
METRICS = (*HOST, *DEVICE)


def nvidia_driver() -> Any:
    """Return the binding of the NVIDIA driver, None where it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


class Hardware:
    """Looks at the machine from a thread of its own, between `start` and `close`.

    Args:
        members: returns the processes of the job.
        disk: a path on the file system that the job writes to.
        nvml: the `pynvml` module, or whatever has its functions.
        disks: returns paths on further file systems that the run needs.
        answer_s: how long the last answer of a device stands in for one that fails.
    """

    def __init__(
        self,
        members: Callable[[], Iterable[psutil.Process]],
        disk: Path,
        nvml: Any = None,
        every_s: float = EVERY_S,
        members_every_s: float = MEMBERS_S,
        disks: Callable[[], Iterable[Path]] = tuple,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._members = members
        self._disk, self._disks = disk, disks
        self._nvml = nvml
        self._troubles: deque[str] = deque()
        self._every_s = every_s
        self._members_every_s = members_every_s
        self._over = threading.Event()
        self._thread = Thread(target=self._run, name="hardware", daemon=True)
        self._answer_s = answer_s
        self._strikes: dict[str, tuple[int, float]] = {}  # how many in a row, and when the last
        self._failed: set[str] = set()  # subjects whose trouble was reported
        self._device_total: int | None = None
        self._xids: Xids
        self._growth = MemoryGrowth()
        self._steps = False
        self._launch = threading.Lock()  # held to change `_growth`, and to tell what came of one
        self._peak_bytes = 0
        self._host: Mapping[str, float] = {}
        self._of_pid: Mapping[int, Mapping[str, float]] = {}
        self._device_share = 0.0
        self._shares: dict[int, tuple[float, float]] = {}  # of the job's devices, and since when
        self._at = float("-inf")
        self._cpu: tuple[float, float, dict[int, tuple[float, float]]] | None = None
        self._found: list[psutil.Process] = []
        self._found_at = float("-inf")

    def start(self) -> None:
        """Begin to look."""
        try:
            self._thread.start()
        except RuntimeError as error:  # at the limit of processes and threads
            self._troubles.append(f"the machine is not measured: {error}")

    def close(self) -> None:
        """End; a driver that hangs is left behind with its daemon thread."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)

    def reset(self) -> None:
        """The job was started again: its memory grows anew, and what failed is asked again."""
        self._strikes.clear()
        self._failed.clear()
        with self._launch:
            self._growth, self._steps = MemoryGrowth(), False
            self._found_at = float("-inf")
            self._host = _without_growth(self._host)

    def newest(self, pid: int, leads: bool) -> dict[str, float]:
        """Return what was last seen, for the frames of the rank with this pid.

        A rank gets the values of the devices it computes on: the highest, of `gpu_util` the lowest.
        The rank that leads gets those of the host too, and in a container, where nobody can tell
        whose device is whose, those of all devices in use. Empty when the last look is too old.
        The first frame of the rank that leads says that the job makes steps: its growth counts.
        """
        self._steps = self._steps or leads
        if time.monotonic() - self._at > STALE_S:
            return {}
        devices = self._of_pid.get(pid) or (self._of_pid.get(ELSEWHERE, {}) if leads else {})
        return {**devices, **(self._host if leads else {})}

    @property
    def peak_bytes(self) -> int | None:
        """The most memory of its own that the job was seen with, None: never seen. Any thread."""
        return self._peak_bytes or None

    @property
    def device_share(self) -> float:
        """The share of the time that the job's most used device is in use; 0.0 where nobody knows,
        and without one. Any thread."""
        return self._device_share if time.monotonic() - self._at <= STALE_S else 0.0

    @property
    def device_count(self) -> int | None:
        """How many devices the driver had when it was first asked, None for none. Any thread."""
        return self._device_total or None

    def troubles(self) -> list[str]:
        """Return, once, why something cannot be measured; at most one sentence per subject."""
        return [self._troubles.popleft() for _ in range(len(self._troubles))]

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self.measure()

    def measure(self) -> None:
        """Ask everything once."""
        growth = self._growth  # of the launch that is looked at, before its processes are
        host: dict[str, float] = {}
        host |= self._guarded("memory", lambda: self._memory(growth), {})
        host |= self._guarded("cpu", self._wait, {})
        host |= self._guarded("disk", self._free, {})
        with self._launch:
            self._host = host if growth is self._growth else _without_growth(host)
        self._device_share, self._of_pid = self._guarded("devices", self._by_pid, (0.0, {}))
        self._at = time.monotonic()

    def _guarded(self, subject: str, ask: Callable[[], Any], otherwise: Any) -> Any:
        strikes, failed_at = self._strikes.get(subject, (0, 0.0))
        if strikes >= STRIKES and time.monotonic() < failed_at + self._answer_s / RETRIES:
            return otherwise
        try:
            answer = ask()
        except Exception as error:
            self._strikes[subject] = strikes + 1, time.monotonic()
            if strikes + 1 >= STRIKES and subject not in self._failed:
                self._failed.add(subject)
                text = f"{subject} cannot be measured: {type(error).__name__}: {error}"
                self._troubles.append(text)
                _log.exception("%s", text)
            return otherwise
        self._strikes.pop(subject, None)
        return answer

    # ── the host ──────────────────────────────────────────────────────────────────────────────────

    def _memory(self, growth: MemoryGrowth) -> dict[str, float]:
        private, files = 0, 0
        now_s = time.monotonic()
        if now_s >= self._found_at + self._members_every_s:
            self._found, self._found_at = list(self._members()), now_s
        for process in self._found:
            try:
                sizes = process.memory_info()
                private += sizes.rss - getattr(sizes, "shared", 0)  # only Linux tells it
                files += process.num_fds()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        self._peak_bytes = max(self._peak_bytes, private)
        memory = psutil.virtual_memory()
        values = {"host_mem_used": memory.percent, "open_files": float(files)}
        if self._steps:
            growth.add(time.monotonic(), private, memory.available)
        growth_bound = growth.lower_bound()
        if growth_bound is not None:
            values["host_mem_growth"] = growth_bound * 3600.0
        return values

    def _wait(self) -> dict[str, float]:
        """Return how long the job waits for CPUs that others have: the most of its main threads."""
        times = psutil.cpu_times()
        busy = sum(times) - times.idle - getattr(times, "iowait", 0.0)
        now = time.monotonic(), busy, {p.pid: _cpu_and_wait_s(p) for p in self._found}
        previous_cpu, self._cpu = self._cpu, now
        if previous_cpu is None or now[1] <= previous_cpu[1]:
            return {}
        used, waited = 0.0, 0.0
        for pid, (cpu_s, wait_s) in now[2].items():
            if pid in previous_cpu[2]:
                used += cpu_s - previous_cpu[2][pid][0]
                waited = max(waited, wait_s - previous_cpu[2][pid][1])
        others_share = max(0.0, 1.0 - used / (now[1] - previous_cpu[1]))
        return {
            "host_cpu_wait": 100.0 * others_share * min(1.0, waited / (now[0] - previous_cpu[0]))
        }

    def _free(self) -> dict[str, float]:
        free = [100.0 - psutil.disk_usage(str(self._disk)).percent]
        for path in self._disks():
            with suppress(OSError):
                free.append(100.0 - psutil.disk_usage(str(path)).percent)
        return {"disk_free": min(free)}

    # ── devices ───────────────────────────────────────────────────────────────────────────────────

    def _by_pid(self) -> tuple[float, dict[int, dict[str, float]]]:
        """Return the share of time of the job's most used device, and what each process's tell."""
        nvml = self._nvml
        if nvml is None:
            return 0.0, {}
        if self._device_total is None:
            self._device_total = count_devices(nvml)
            self._xids = Xids(nvml, self._device_total)
        by_pid: dict[int, dict[str, float]] = {}
        errors, now_s = self._xids.count(), time.monotonic()
        ours = {ELSEWHERE, *(process.pid for process in self._found)}
        for index in range(self._device_total):
            ask = partial(self._device, nvml, index)
            answer = self._guarded(f"device {index}", ask, None)
            if answer is None:
                continue
            users, values = answer
            values["gpu_xid_errors"] = float(errors)
            if not ours & {pid if psutil.pid_exists(pid) else ELSEWHERE for pid in users}:
                self._shares.pop(index, None)
            elif "gpu_util" in values:
                self._shares[index] = values["gpu_util"] / 100.0, now_s
            for pid in users:
                mine = by_pid.setdefault(pid if psutil.pid_exists(pid) else ELSEWHERE, {})
                for name, value in values.items():
                    worse = min if name == "gpu_util" else max
                    mine[name] = worse(mine.get(name, value), value)
        young = (s for s, at in self._shares.values() if now_s - at <= self._answer_s)
        return max(young, default=0.0), by_pid

    def _device(self, nvml: Any, index: int) -> tuple[list[int], dict[str, float]]:
        """Return who computes on a device, and what it tells, as far as it is supported."""
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        users = [int(user.pid) for user in nvml.nvmlDeviceGetComputeRunningProcesses(device)]

        def memory_share() -> float:
            memory = nvml.nvmlDeviceGetMemoryInfo(device)
            return float(100.0 * memory.used / memory.total)

        queries: dict[str, Callable[[], float]] = {
            "gpu_util": lambda: float(nvml.nvmlDeviceGetUtilizationRates(device).gpu),
            "gpu_mem_used": memory_share,
            "gpu_temperature": lambda: float(
                nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)
            ),
            "gpu_power": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000.0,
            "gpu_ecc_errors": lambda: float(
                nvml.nvmlDeviceGetTotalEccErrors(
                    device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            ),
        }
        values = {}
        for name, ask in queries.items() if users else ():
            # Consumer cards count no ECC errors, and one whose memory is the host's tells none.
            with suppress(nvml.NVMLError):
                values[name] = ask()
        return users, values


def count_devices(nvml: Any) -> int:
    """Return how many devices the driver has."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, no device: nothing is missing
        return 0
    return int(nvml.nvmlDeviceGetCount())


def _without_growth(host: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in host.items() if name != "host_mem_growth"}


class Xids:
    """Counts the critical errors (XID) that the driver reports from now on, over all devices."""

    def __init__(self, nvml: Any, device_total: int) -> None:
        self._nvml = nvml
        self._total = 0
        self._set: Any = None
        try:
            self._set = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:  # not on this platform: the count stays zero
            return
        for index in range(device_total):
            with suppress(nvml.NVMLError):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, self._set)

    def count(self) -> int:
        """Return how many there were so far. Does not wait for one."""
        while self._set is not None:
            try:
                self._nvml.nvmlEventSetWait_v2(self._set, 0)
            except self._nvml.NVMLError:  # a timeout is an error too: there is none now
                break
            self._total += 1
        return self._total


def _cpu_and_wait_s(process: psutil.Process) -> tuple[float, float]:
    """Return the CPU time of a process, and how long its main thread was ready without a CPU."""
    try:
        times = process.cpu_times()
        schedstat = Path(f"/proc/{process.pid}/schedstat").read_text()
    except (psutil.Error, OSError):  # it is gone, or the kernel does not count
        return 0.0, 0.0
    return times.user + times.system, int(schedstat.split()[1]) / 1e9
