"""Looks at this host before a job is started on it again, and says whether it is fit for that.

While the job still runs, only what costs it nothing is asked: the disk, and the driver. Once its
processes are dead, memory is asked for too, which comes back within seconds, and every device
multiplies matrices whose product is known. Programs that may hang are processes of their own; one
that does not answer in time leaves the question undecided, and the job is started.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from .. import children
from ..core.analysis import host_health
from ..core.analysis.failure_classes import FailureClass
from ..core.analysis.host_health import BAD, MATMUL, SKIPPED, UNDECIDED, Finding
from . import memory, nvml_report

MATMUL_S = 5.0  # project default, long enough for a device to become warm
DRIVER_S = 30.0  # 8 devices without persistence mode take 20 s
START_S = 90.0  # until torch is imported and each device has a context
MEMORY_S, LOOK_S = 20.0, 0.5  # how long memory may take to come back, and between two looks
OFF = "none"  # of `job.health`
NVIDIA, AMD = (Path("/dev/nvidiactl"), Path("/dev/dxg")), Path("/dev/kfd")  # dxg: under Windows


class Machine(Protocol):
    """What is known of the host from the time when the job ran; see `inputs.hardware.Hardware`."""

    @property
    def peak_bytes(self) -> int | None: ...
    @property
    def device_count(self) -> int | None: ...


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


@dataclass(frozen=True)
class KnownMachine:
    """A machine as another run has left word of it."""

    peak_bytes: int | None
    device_count: int | None


class HealthGate:
    """Looks at this host for one run.

    Args:
        wanted: returns the policy's `job.health`.
        environ: of the job, as the user gave it.
        machine: returns what is known of the host, None for nothing.
        classes: returns the classes of failures, by which an error of a device is told.
    """

    def __init__(
        self,
        wanted: Callable[[], Mapping[str, Any] | str | None],
        environ: Mapping[str, str],
        machine: Callable[[], Machine | None],
        classes: Callable[[], Sequence[FailureClass]],
    ) -> None:
        self._wanted = wanted
        self._environ = {k: v for k, v in environ.items() if not k.startswith("SUPERVISE")}
        self._machine = machine
        self._classes = classes

    def look(self, start: Start, within_s: float, *, alive: bool) -> list[Finding]:
        """Return what was found; nothing where the policy wants no look. Blocks.

        Args:
            within_s: what is not answered by then is undecided.
            alive: the job runs.
        """
        wanted = self._wanted()
        if wanted == OFF:
            return []
        until_s = time.monotonic() + within_s
        settings = wanted if isinstance(wanted, Mapping) else {}
        disk = self._disk(start, settings)
        devices, report = self._devices(until_s)
        if alive:
            return [disk, devices]
        found = [self._memory(settings, until_s), disk, devices]
        if host_health.refusal(found):
            return found
        return [*found, self._matmul(start, settings, bool(report), until_s)]

    def memo(self, start: Start) -> dict[str, Any]:
        """Return what `of_memo` needs to ask the same questions later; plain data."""
        machine = self._machine()
        return {
            "host": socket.gethostname(),
            "folder": str(start.folder),
            "size": start.size,
            "python": start.python,
            "peak_bytes": None if machine is None else machine.peak_bytes,
            "device_count": None if machine is None else machine.device_count,
        }

    def _memory(self, settings: Mapping[str, Any], until_s: float) -> Finding:
        """Judge the memory, once it has come back."""
        machine = self._machine()
        peak = None if machine is None else machine.peak_bytes
        wanted, until_s = _bytes(settings, "memory_gb"), min(until_s, time.monotonic() + MEMORY_S)
        while True:
            found = host_health.judge_memory(memory.available_bytes(), peak, wanted)
            if found.verdict != BAD or time.monotonic() > until_s - LOOK_S:
                return found
            time.sleep(LOOK_S)

    def _disk(self, start: Start, settings: Mapping[str, Any]) -> Finding:
        free, total = None, 0
        try:
            usage = shutil.disk_usage(start.folder)
            free, total = usage.free, usage.total
        except OSError:
            pass
        wanted = _bytes(settings, "disk_gb")
        return host_health.judge_disk(str(start.folder), free, total, start.size, wanted)

    def _devices(self, until_s: float) -> tuple[Finding, list[Any]]:
        """Judge what the driver says; return its devices too."""
        machine = self._machine()
        before = None if machine is None else machine.device_count
        rows: list[Any] | None = []
        trouble = ""
        if before or any(node.exists() for node in NVIDIA):
            command = [sys.executable, "-I", nvml_report.__file__]
            rows, trouble = _answer(command, min(DRIVER_S, until_s - time.monotonic()), None)
        some = bool(self._environ.get("CUDA_VISIBLE_DEVICES"))
        found = host_health.judge_devices(rows, before, some=some, trouble=trouble)
        return found, rows or []

    def _matmul(
        self, start: Start, settings: Mapping[str, Any], has_devices: bool, until_s: float
    ) -> Finding:
        """Let the job's torch multiply, on devices only unless the policy says how long."""
        seconds = settings.get("matmul")
        if seconds is None and not (has_devices or AMD.exists()):
            return Finding(MATMUL, SKIPPED, "no device; job.health.matmul asks the CPU")
        seconds = MATMUL_S if seconds is None else float(seconds)
        if not seconds:
            return Finding(MATMUL, SKIPPED, "job.health.matmul is 0")
        if start.python is None:
            return Finding(MATMUL, UNDECIDED, "the job's Python is not known")
        spec = find_spec("supervise_offline")
        assert spec is not None, "supervise_offline is part of this distribution"
        assert spec.origin is not None
        program = str(Path(spec.origin).parent / "devices")
        command = [start.python, "-I", program, str(seconds)]
        within_s = min(START_S + seconds, until_s - time.monotonic())
        answer, trouble = _answer(command, within_s, self._environ)
        if answer is None or "error" in answer:
            text = trouble if answer is None else str(answer["error"])
            return Finding(MATMUL, UNDECIDED, text)
        return host_health.judge_matmul(answer["devices"], self._classes(), seconds)


def of_memo(memo: Mapping[str, Any]) -> tuple[Start, KnownMachine]:
    """Return what is to be started from, and what was known of the machine.

    Raises:
        LookupError, TypeError, ValueError: it is no memo.
    """
    start = Start(Path(memo["folder"]), float(memo["size"]), memo["python"])
    return start, KnownMachine(memo["peak_bytes"], memo["device_count"])


def _bytes(settings: Mapping[str, Any], name: str) -> float | None:
    gb = settings.get(name)
    return None if gb is None else float(gb) * host_health.GB


def _answer(
    command: Sequence[str], within_s: float, environ: Mapping[str, str] | None
) -> tuple[Any, str]:
    """Run a program; return its last line, read as JSON, or None and why there is none."""
    if within_s <= 0.0:
        return None, "there was no time left to ask"
    try:
        done = children.run(command, within_s=within_s, env=environ)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {within_s:.0f} s"
    except OSError as error:
        return None, f"{command[0]} cannot be started: {error.strerror or error}"
    try:
        return json.loads(done.stdout.splitlines()[-1]), ""
    except (IndexError, ValueError):
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return None, (lines or [f"it ended with code {done.returncode}"])[-1][:200]
