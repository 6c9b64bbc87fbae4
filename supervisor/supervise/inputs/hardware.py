"""The machine under the job: devices by NVML, memory, files and disk by psutil, once a few seconds.

A driver may block for seconds, so a thread of its own asks and the loop only ever looks at the last
answer. What a machine does not have is absent; a question that fails twice in a row is not asked
again, with one sentence why. Decides nothing.

The job's own memory is what its processes have resident, less their shared pages. A forked child
that still shares pages with its parent has them counted again; memory in use that is shared (files
in /dev/shm, batches that a DataLoader hands over) is not counted at all.

Source: NVML device queries (what `nvidia-smi` prints); psutil.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ..threads import Thread
from .memory_growth import Growth

_log = logging.getLogger(__name__)
EVERY_S = 2.0  # between two looks
MEMBERS_S = 10.0  # between two searches for the processes of the job, which read all of /proc
STALE_S = 30.0  # an answer older than that is no answer
STRIKES = 2
ELSEWHERE = 0  # stands for pids of another namespace: in a container the driver tells the host's

HOST = ("host_mem_used", "host_mem_growth", "open_files", "disk_free")
DEVICE = (
    *("gpu_util", "gpu_mem_used", "gpu_temperature", "gpu_power", "gpu_ecc_errors"),
    "gpu_xid_errors",
)
METRICS = (*HOST, *DEVICE)


def driver() -> Any:
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
    """

    def __init__(
        self,
        members: Callable[[], Iterable[psutil.Process]],
        disk: Path,
        nvml: Any = None,
        every_s: float = EVERY_S,
        members_every_s: float = MEMBERS_S,
        disks: Callable[[], Iterable[Path]] = tuple,
    ) -> None:
        self._members = members
        self._disk, self._disks = disk, disks
        self._nvml = nvml
        self._troubles: deque[str] = deque()
        self._every_s = every_s
        self._members_every_s = members_every_s
        self._over = threading.Event()
        self._thread = Thread(target=self._run, name="hardware", daemon=True)
        self._strikes: dict[str, int] = {}
        self._devices: list[Any] | None = None
        self._xids: Xids
        self._growth = Growth()
        self._steps = False
        self._launch = threading.Lock()  # held to change `_growth`, and to tell what came of one
        self._peak_bytes = 0
        self._host: Mapping[str, float] = {}
        self._of_pid: Mapping[int, Mapping[str, float]] = {}
        self._device_share = 0.0
        self._at = float("-inf")
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
        """The job was started again: how its memory grew before says nothing about it."""
        with self._launch:
            self._growth, self._steps = Growth(), False
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
        return len(self._devices or ()) or None

    def troubles(self) -> list[str]:
        """Return, once, why something cannot be measured; at most one sentence per subject."""
        return [self._troubles.popleft() for _ in range(len(self._troubles))]

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self.look()

    def look(self) -> None:
        """Ask everything once."""
        growth = self._growth  # of the launch that is looked at, before its processes are
        host: dict[str, float] = {}
        host |= self._guarded("memory", lambda: self._memory(growth), {})
        host |= self._guarded("disk", self._free, {})
        with self._launch:
            self._host = host if growth is self._growth else _without_growth(host)
        self._of_pid = self._guarded("devices", self._by_pid, {})
        self._at = time.monotonic()

    def _guarded(self, subject: str, ask: Callable[[], Any], otherwise: Any) -> Any:
        if self._strikes.get(subject, 0) >= STRIKES:
            return otherwise
        try:
            answer = ask()
        except Exception as error:
            self._strikes[subject] = self._strikes.get(subject, 0) + 1
            if self._strikes[subject] == STRIKES:
                what = f"{subject} cannot be measured: {type(error).__name__}: {error}"
                self._troubles.append(what)
                _log.exception("%s", what)
            return otherwise
        self._strikes[subject] = 0
        return answer

    # ── the host ──────────────────────────────────────────────────────────────────────────────────

    def _memory(self, growth: Growth) -> dict[str, float]:
        own, files = 0, 0
        now_s = time.monotonic()
        if now_s >= self._found_at + self._members_every_s:
            self._found, self._found_at = list(self._members()), now_s
        for process in self._found:
            try:
                sizes = process.memory_info()
                own += sizes.rss - getattr(sizes, "shared", 0)  # only Linux tells it
                files += process.num_fds()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        self._peak_bytes = max(self._peak_bytes, own)
        memory = psutil.virtual_memory()
        values = {"host_mem_used": memory.percent, "open_files": float(files)}
        if self._steps:
            growth.add(time.monotonic(), own, memory.available)
        bound = growth.bound()
        if bound is not None:
            values["host_mem_growth"] = bound * 3600.0
        return values

    def _free(self) -> dict[str, float]:
        free = [100.0 - psutil.disk_usage(str(self._disk)).percent]
        for path in self._disks():
            with suppress(OSError):
                free.append(100.0 - psutil.disk_usage(str(path)).percent)
        return {"disk_free": min(free)}

    # ── devices ───────────────────────────────────────────────────────────────────────────────────

    def _by_pid(self) -> dict[int, dict[str, float]]:
        """Return the values of the devices that each process computes on."""
        nvml = self._nvml
        if nvml is None:
            return {}
        if self._devices is None:
            self._devices = self._open(nvml)
            self._xids = Xids(nvml, self._devices)
        found: dict[int, dict[str, float]] = {}
        errors, share = self._xids.count(), 0.0
        ours = {ELSEWHERE, *(process.pid for process in self._found)}
        for device in self._devices:
            users = [int(user.pid) for user in nvml.nvmlDeviceGetComputeRunningProcesses(device)]
            if not users:
                continue
            values = {**self._device(nvml, device), "gpu_xid_errors": float(errors)}
            if ours & {pid if psutil.pid_exists(pid) else ELSEWHERE for pid in users}:
                share = max(share, values.get("gpu_util", 0.0) / 100.0)
            for pid in users:
                mine = found.setdefault(pid if psutil.pid_exists(pid) else ELSEWHERE, {})
                for name, value in values.items():
                    worse = min if name == "gpu_util" else max
                    mine[name] = worse(mine.get(name, value), value)
        self._device_share = share
        return found

    def _open(self, nvml: Any) -> list[Any]:
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:  # no driver, no device: nothing is missing
            return []
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]

    def _device(self, nvml: Any, device: Any) -> dict[str, float]:
        """Return what one device tells; what it does not support is left out."""
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
        asked: dict[str, Callable[[], float]] = {
            "gpu_util": lambda: float(nvml.nvmlDeviceGetUtilizationRates(device).gpu),
            "gpu_mem_used": lambda: 100.0 * memory.used / memory.total,
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
        for name, ask in asked.items():
            try:
                values[name] = ask()
            except nvml.NVMLError:  # consumer cards count no ECC errors, some tell no power
                continue
        return values


def _without_growth(host: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in host.items() if name != "host_mem_growth"}


class Xids:
    """Counts the critical errors (XID) that the driver reports from now on, over all devices."""

    def __init__(self, nvml: Any, devices: Iterable[Any]) -> None:
        self._nvml = nvml
        self._total = 0
        self._set: Any = None
        try:
            self._set = nvml.nvmlEventSetCreate()
            for device in devices:
                nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, self._set)
        except nvml.NVMLError:  # not on this platform: the count stays zero
            self._set = None

    def count(self) -> int:
        """Return how many there were so far. Does not wait for one."""
        while self._set is not None:
            try:
                self._nvml.nvmlEventSetWait_v2(self._set, 0)
            except self._nvml.NVMLError:  # a timeout is an error too: there is none now
                break
            self._total += 1
        return self._total
