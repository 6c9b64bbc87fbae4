"""Health of this host: memory, GPUs, tools that answer, and the gate before a start of the job.

A SIGKILL says nothing about its sender. The memory controller counts its kills per cgroup, and the
kernel all of them; the counter that grew since the launch names the sender. Source: `oom_kill` in
memory.events (Documentation/admin-guide/cgroup-v2.rst) and memory.oom_control
(cgroup-v1/memory.rst), `oom_kill` in /proc/vmstat.

The memory available to a job is the machine's, or the limit of its container. Source: memory.max,
memory.current and memory.stat (cgroup-v2.rst), memory.limit_in_bytes and memory.usage_in_bytes
(cgroup-v1/memory.rst). Inactive file pages (`inactive_file`) are given up when memory is needed.

The gate examines the host before the job is started on it again. While the job still runs, only
disk and driver are asked, which costs it nothing. Once its processes are dead, memory is asked for
too, which comes back within seconds, and every device multiplies matrices whose product is known.
Programs that may hang are processes of their own; one that does not answer in time leaves the
question undecided, and the job is started.

Facts about code, host and processes for the evidence are read only; a function leaves out or
describes what it cannot read, since a broken tool must not cost an incident its other evidence.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
from msgspec import UNSET, Struct, UnsetType

from .. import system
from ..core import host_health
from ..core.host_health import BAD, MATMUL, SKIPPED, UNDECIDED, Device, Finding
from ..core.model.failure import FailureClass
from ..core.model.policy import HostHealth
from ..core.notices import Cause
from ..core.reasons import CheckExit, CheckGap, CheckTimeout, CheckUnavailable, Reported
from ..store import files
from . import nvml_report
from .hardware import Hardware

CGROUPS, MEMBERSHIP, KERNEL = (
    Path("/sys/fs/cgroup"),
    Path("/proc/self/cgroup"),
    Path("/proc/vmstat"),
)

NO_TROUBLE = Reported(report="")


class OomCounters:
    """The counters of the cgroup that we and the job are in, and of the kernel.

    Args:
        group: file with the counter of the cgroup; None: it cannot be read here.
        kernel: file with the counter of the kernel.
    """

    def __init__(self, group: Path | None, kernel: Path = KERNEL) -> None:
        self._files = {"this cgroup": group, "this machine": kernel}
        self._before: Mapping[str, int] = self._read()

    @classmethod
    def here(cls) -> OomCounters:
        """Return those of this process."""
        return cls(group_file())

    def start(self) -> None:
        """The job is about to be launched: what was counted until now is not its own."""
        self._before = self._read()

    def describe_kills(self) -> str:
        """Return how many processes were killed since the start, and where; "" for none."""
        now = self._read()
        for counter, total in now.items():
            grown = total - self._before.get(counter, total)
            if grown > 0:
                count = f"{grown} process" + ("es" if grown > 1 else "")
                return f"the kernel's out of memory killer ended {count} of {counter}"
        return ""

    def _read(self) -> dict[str, int]:
        totals = {}
        for counter, path in self._files.items():
            count = _counter(path)
            if count is not None:
                totals[counter] = count
        return totals


def group_file(membership: Path = MEMBERSHIP, root: Path = CGROUPS) -> Path | None:
    """Return the file with the counter of our cgroup, None where there is none."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        number, controllers, group = [*line.split(":", 2), "", ""][:3]
        below = group.lstrip("/")
        if number == "0" and not controllers:
            places = [root / below / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            places = [root / "memory" / below / "memory.oom_control"]
        else:
            continue
        # In a container the group's own path may not be visible: its root is the group then.
        for path in places:
            if path.is_file():
                return path
    return None


def _counter(path: Path | None) -> int | None:
    if path is None:
        return None
    try:
        rows = (line.split() for line in path.read_text().splitlines())
        return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == "oom_kill"), None)
    except (OSError, ValueError):
        return None


TOOL_S = 5.0  # time limit of an external tool
TAIL_BYTES = 64 * 1024
DIRTY_FILES = 200


def run_tool(argv: Sequence[str], timeout_s: float = TOOL_S, cwd: Path | None = None) -> bytes:
    """Run an external tool and return its stdout.

    Raises:
        OSError: it is not installed, failed, or took longer than `timeout_s`.
    """
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    environ.pop("PYTHONPATH", None)
    try:
        process = system.run_tool(argv, within_s=timeout_s, env=environ, cwd=cwd)
    except subprocess.TimeoutExpired:
        raise OSError(f"{argv[0]} took longer than {timeout_s:g} s") from None
    if process.returncode != 0:
        lines = process.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit code {process.returncode}"
        raise OSError(f"{Path(argv[0]).name}: {reason}")
    return process.stdout


class CodeVersion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The version of a directory of code, or the reason why it is `missing`.

    Attributes:
        dirty: files that differ from the commit. files: digests of named files.
    """

    commit: str | UnsetType = UNSET
    branch: str | UnsetType = UNSET
    dirty: list[str] | UnsetType = UNSET
    dirty_count: int | UnsetType = UNSET
    diff_sha256: str | UnsetType | None = UNSET
    files: Mapping[str, str] | UnsetType = UNSET
    missing: str | UnsetType = UNSET


def read_git_facts(directory: Path) -> CodeVersion:
    """Return the version of the code in `directory`: commit, branch, dirty files, hash of the diff.

    The diff itself is left out: it may contain secrets. Its SHA-256 shows whether two runs had the
    same one.
    """
    base = ["git", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false"]
    try:
        head = run_tool([*base, "rev-parse", "HEAD", "--abbrev-ref", "HEAD"], cwd=directory)
        status = run_tool([*base, "status", "--porcelain"], cwd=directory)
        dirty = status.decode("utf-8", "replace").splitlines()
        diff = b""
        if any(not line.startswith("??") for line in dirty):
            diff = run_tool(
                [*base, "diff", "--no-ext-diff", "--no-textconv", "HEAD"], cwd=directory
            )
    except OSError as error:
        return CodeVersion(missing=str(error))
    commit, _, branch = head.decode("utf-8", "replace").strip().partition("\n")
    return CodeVersion(
        commit=commit,
        branch=branch,
        dirty=dirty[:DIRTY_FILES],
        dirty_count=len(dirty),
        diff_sha256=hashlib.sha256(diff).hexdigest() if diff else None,
    )


def machine_facts(*disks: Path) -> dict[str, Any]:
    """Return the machine and its load; sizes in bytes."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    space: dict[str, dict[str, Any]] = {}
    for disk in disks:
        try:
            usage = psutil.disk_usage(str(disk))
            space[str(disk)] = {"total": usage.total, "free": usage.free}
        except OSError as error:
            space[str(disk)] = {"missing": str(error)}
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "supervisor_python": sys.version.split()[0],
        "cpus": psutil.cpu_count(),
        "load": list(os.getloadavg()),
        "memory": {"total": memory.total, "available": memory.available},
        "swap": {"total": swap.total, "used": swap.used},
        "disks": space,
        "up_s": round(time.time() - psutil.boot_time()),
    }


class ProcessRow(Struct, frozen=True, kw_only=True):
    """A process of the job; memory in bytes, CPU time in seconds."""

    pid: int
    parent: int
    command: Sequence[str]
    state: str
    threads: int
    rss: int
    cpu_s: float


def process_rows(members: Sequence[psutil.Process]) -> list[ProcessRow]:
    """Return one row per process that still lives."""
    rows = []
    for process in members:
        try:
            with process.oneshot():
                times = process.cpu_times()
                rows.append(
                    ProcessRow(
                        pid=process.pid,
                        parent=process.ppid(),
                        command=process.cmdline(),
                        state=process.status(),
                        threads=process.num_threads(),
                        rss=process.memory_info().rss,
                        cpu_s=times.user + times.system,
                    )
                )
        except (psutil.Error, OSError):
            continue
    return rows


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that process `pid` was started with; empty if unreadable."""
    try:
        return psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return {}


def output_files_by_path(pid: int) -> dict[str, Path]:
    """Return the regular files that stdout and stderr of a process go to.

    Returns:
        Their names, and the paths to read them by: below /proc, which also reaches a rotated file.
    """
    paths: dict[str, Path] = {}
    for number in (1, 2):
        link = Path(f"/proc/{pid}/fd/{number}")
        try:
            if stat.S_ISREG(link.stat().st_mode):
                paths.setdefault(str(link.readlink()).removesuffix(" (deleted)"), link)
        except OSError:
            continue
    return paths


def read_tail(path: Path) -> str:
    """Return the last TAIL_BYTES of a file as text, from a line's beginning.

    Raises:
        OSError: it cannot be read.
    """
    with os.fdopen(files.open_file(path, foreign=True), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        data = file.read(TAIL_BYTES)
    if size > TAIL_BYTES:
        data = data.partition(b"\n")[2]
    return data.decode("utf-8", "replace")


LIMITS = (  # of a cgroup: most, in use, and the row of memory.stat that can be given up
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(group: Path | None = None) -> int | None:
    """Return what can be had without swapping, None where the system does not say.

    Args:
        group: folder of the cgroup; default: ours.
    """
    available = [max(0, limit - in_use) for limit, in_use in _limits(group)]
    with suppress(OSError, RuntimeError):
        available.append(int(psutil.virtual_memory().available))
    return min(available, default=None)


def memory_bytes(group: Path | None = None) -> int:
    """Return the memory of the machine, or of the container where that has less; see above."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for limit, _ in _limits(group))])


def _limits(group: Path | None) -> Iterator[tuple[int, int]]:
    """Yield the limits of our cgroup and of those around it, each with what is in use of it."""
    if group is None:
        counters = group_file()
        group = None if counters is None else counters.parent
    for folder in () if group is None else (group, *group.parents):
        for limit_file, in_use_file, unused in LIMITS:
            with suppress(OSError, ValueError):
                limit = int((folder / limit_file).read_text())  # "max" is no number: no limit
                rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
                idle = next((int(row[1]) for row in rows if row[:1] == [unused]), 0)
                yield limit, int((folder / in_use_file).read_text()) - idle


MATMUL_S = 5.0  # project default, long enough for a device to become warm
DRIVER_S = 30.0  # 8 devices without persistence mode take 20 s
START_S = 90.0  # until torch is imported and each device has a context
MEMORY_S, LOOK_S = 20.0, 0.5  # how long memory may take to come back, and between two looks
OFF: Literal["none"] = "none"  # of `job.health`
NVIDIA, AMD = (Path("/dev/nvidiactl"), Path("/dev/dxg")), Path("/dev/kfd")  # dxg: under Windows


@dataclass(frozen=True)
class Start:
    """What the job is to be started from.

    Attributes:
        folder: of the checkpoint. size: its bytes.
        python: the job's interpreter, None: unknown.
    """

    folder: Path
    size: float = 0.0
    python: str | None = None


class UnfitHost(Struct, frozen=True, kw_only=True):
    """A host that was not fit: what was to be started on it, and what was known of it."""

    host: str
    folder: str
    size: float
    python: str | None
    peak_bytes: int | None
    device_count: int | None
    why: str = ""

    @property
    def start(self) -> Start:
        """What was to be started."""
        return Start(Path(self.folder), self.size, self.python)


class HealthGate:
    """Looks at this host for one run.

    Args:
        configured: returns the policy's `job.health`.
        environ: of the job, as the user gave it.
        machine: returns what is known of the host, None for nothing.
        classes: returns the classes of failures, by which an error of a device is told.
        available: returns the memory that the job may use, in bytes.
    """

    def __init__(
        self,
        configured: Callable[[], HostHealth | Literal["none"] | None],
        environ: Mapping[str, str],
        machine: Callable[[], Hardware | UnfitHost | None],
        classes: Callable[[], Sequence[FailureClass]],
        available: Callable[[], int | None] = available_bytes,
    ) -> None:
        self._available = available
        self._wanted = configured
        self._environ = {k: v for k, v in environ.items() if not k.startswith("SUPERVISE")}
        self._machine = machine
        self._classes = classes

    def check_host(self, start: Start, within_s: float, *, alive: bool) -> list[Finding]:
        """Return what was found; nothing where the policy wants no look. Blocks.

        Args:
            within_s: what is not answered by then is undecided.
            alive: the job runs.
        """
        settings = self._wanted() or HostHealth()
        if settings == OFF:
            return []
        until_s = time.monotonic() + within_s
        disk = self._disk(start, settings)
        devices, report = self._devices(until_s)
        if alive:
            return [disk, devices]
        findings = [self._memory(settings, until_s), disk, devices]
        if host_health.explain_unfit(findings):
            return findings
        return [*findings, self._matmul(start, settings, bool(report), until_s)]

    def unfit_host_record(self, start: Start, reason: str) -> UnfitHost:
        """Return what is needed to ask the same questions later."""
        machine = self._machine()
        return UnfitHost(
            host=socket.gethostname(),
            folder=str(start.folder),
            size=start.size,
            python=start.python,
            peak_bytes=None if machine is None else machine.peak_bytes,
            device_count=None if machine is None else machine.device_count,
            why=reason,
        )

    def _memory(self, settings: HostHealth, until_s: float) -> Finding:
        """Judge the memory, once it has come back."""
        machine = self._machine()
        peak = None if machine is None else machine.peak_bytes
        required_bytes = _bytes(settings.memory_gb)
        until_s = min(until_s, time.monotonic() + MEMORY_S)
        while True:
            finding = host_health.judge_memory(self._available(), peak, required_bytes)
            if finding.verdict != BAD or time.monotonic() > until_s - LOOK_S:
                return finding
            time.sleep(LOOK_S)

    def _disk(self, start: Start, settings: HostHealth) -> Finding:
        free, total = None, 0
        try:
            usage = shutil.disk_usage(start.folder)
            free, total = usage.free, usage.total
        except OSError:
            pass
        required_bytes = _bytes(settings.disk_gb)
        return host_health.judge_disk(str(start.folder), free, total, start.size, required_bytes)

    def _devices(self, until_s: float) -> tuple[Finding, list[Any]]:
        """Judge what the driver says; return its devices too."""
        machine = self._machine()
        previous_count = None if machine is None else machine.device_count
        rows: list[Any] | None = []
        trouble: Cause = NO_TROUBLE
        if previous_count or any(node.exists() for node in NVIDIA):
            command = [sys.executable, "-I", nvml_report.__file__]
            rows, trouble = _answer(command, min(DRIVER_S, until_s - time.monotonic()), None)
        some = bool(self._environ.get("CUDA_VISIBLE_DEVICES"))
        devices = None if rows is None else msgspec.convert(rows, list[Device])
        findings = host_health.judge_devices(devices, previous_count, some=some, trouble=trouble)
        return findings, rows or []

    def _matmul(
        self, start: Start, settings: HostHealth, has_devices: bool, until_s: float
    ) -> Finding:
        """Let the job's torch multiply, on devices only unless the policy says how long."""
        seconds = settings.matmul
        if seconds is None and not (has_devices or AMD.exists()):
            return Finding(MATMUL, SKIPPED, CheckGap.NO_DEVICE)
        seconds = MATMUL_S if seconds is None else seconds
        if not seconds:
            return Finding(MATMUL, SKIPPED, CheckGap.MATMUL_OFF)
        if start.python is None:
            return Finding(MATMUL, UNDECIDED, CheckGap.PYTHON_UNKNOWN)
        spec = find_spec("supervise_offline")
        assert spec is not None, "supervise_offline is part of this distribution"
        assert spec.origin is not None
        program = str(Path(spec.origin).parent / "devices.py")
        command = [start.python, "-I", program, str(seconds)]
        within_s = min(START_S + seconds, until_s - time.monotonic())
        answer, trouble = _answer(command, within_s, self._environ)
        if answer is None or "error" in answer:
            error = trouble if answer is None else Reported(report=str(answer["error"]))
            return Finding(MATMUL, UNDECIDED, error)
        devices = msgspec.convert(answer["devices"], list[Device])
        return host_health.judge_matmul(devices, self._classes(), seconds)


def _bytes(gb: float | None) -> float | None:
    return None if gb is None else gb * host_health.GB


def _answer(
    command: Sequence[str], within_s: float, environ: Mapping[str, str] | None
) -> tuple[Any, Cause]:
    """Run a program; return its last line, read as JSON, or None and why there is none."""
    if within_s <= 0.0:
        return None, CheckGap.NO_TIME
    try:
        command = [*files.run_as_owner_prefix(command[0]), *command]
        process = system.run_tool(command, within_s=within_s, env=environ)
    except subprocess.TimeoutExpired:
        return None, CheckTimeout(seconds=within_s)
    except OSError as error:
        reason = str(error.strerror or error)
        return None, CheckUnavailable(command=command[0], error=reason)
    try:
        return json.loads(process.stdout.splitlines()[-1]), NO_TROUBLE
    except (IndexError, ValueError):
        lines = process.stderr.decode("utf-8", "replace").strip().splitlines()
        if not lines:
            return None, CheckExit(returncode=process.returncode)
        return None, Reported(report=lines[-1][:200])
