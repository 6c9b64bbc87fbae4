"""Starts the verifier in the job's interpreter, one at a time, and says what became of it.

A process of its own: reading a damaged file may crash it, hang it or fill memory, and none of that
may reach the supervisor or the job. It is as nice as who starts it, and never sees a device.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ..children import Child

LIMIT_S = 900.0  # for one checkpoint, and one second more for each SLOWEST bytes; project defaults
SLOWEST = 20_000_000
# What reading a damaged file may end in; other signals come from somebody else.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


@dataclass(frozen=True)
class Answer:
    """What verifying came to.

    Attributes:
        ok: None where it could not be told.
        problems: why not, one sentence each.
        found: what the verifier told of the checkpoint, see `supervise_offline.checkpoint.verify`.
        environment: of the interpreter; empty if it did not get so far.
    """

    ok: bool | None
    problems: tuple[str, ...] = ()
    found: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)


class Verifier:
    """Verifies checkpoints by `wanted`: some of `load`, `finite`, `optimizer`."""

    def __init__(self, wanted: Iterable[str], limit_s: float = LIMIT_S) -> None:
        self._wanted = dict.fromkeys(wanted, True)
        self._wanted["load"] = bool(self._wanted)
        self._limit_s = limit_s
        self._process: Child | None = None
        self._closed = self._cancelled = False
        spec = importlib.util.find_spec("supervise_offline")
        places = spec.submodule_search_locations if spec is not None else None
        self._program = str(Path(*places, "checkpoint")) if places else ""

    def verify(self, path: str, size: int, python: str | None, *, urgent: bool = False) -> Answer:
        """Verify one checkpoint of `size` bytes. Blocks; never raises for what is in it.

        Raises:
            InterruptedError: see `cancel`.

        Args:
            python: the job's interpreter; None, or one that is not here: our own.
            urgent: nobody else needs the disk.
        """
        if python is None or not os.access(python, os.X_OK):
            python = sys.executable
        limit_s = self._limit_s + size / SLOWEST
        try:
            lines, error, code = self._run(
                [python, "-I", self._program], [path], limit_s, urgent=urgent
            )
        except InterruptedError:  # an OSError, too: there is no verdict
            raise
        except OSError as failed:
            return Answer(None, (f"the verifier could not be started: {failed}",))
        except subprocess.TimeoutExpired:
            return Answer(None, (f"the verifier took longer than {limit_s:.0f} s",))
        environment: dict[str, Any] = lines[0].get("environment", {}) if lines else {}
        found = next((r for r in lines if r.get("path") == path), None)
        if found is not None:
            problems = (*found["problems"], *found["unread"])
            return Answer(found["ok"], problems, found, environment)
        ok, problem = _ending(code, [r["error"] for r in lines if "error" in r], error)
        return Answer(ok, (problem,), {}, environment)

    def close(self) -> None:
        """End what is running; whatever waits for it gets an answer."""
        self._closed = True
        if (process := self._process) is not None:
            process.hang_up()

    def cancel(self) -> None:
        """Give up the verification that is under way; for any thread."""
        process = self._process
        if process is not None and process.poll() is None:
            self._cancelled = True
            process.hang_up()

    def lower_priority(self, niceness: int) -> None:
        """Let what is running be so nice from now on; for any thread."""
        if (process := self._process) is not None:
            with suppress(psutil.Error, OSError):  # it is over
                reaper = psutil.Process(process.pid)
                _yield(reaper, niceness)  # first: what it starts from now on is as nice
                for each in reaper.children(recursive=True):
                    _yield(each, niceness)

    def _run(
        self, command: Sequence[str], paths: Sequence[str], limit_s: float, *, urgent: bool
    ) -> tuple[list[dict[str, Any]], str, int]:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SUPERVISE")}
        environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._cancelled = False
        pipe = subprocess.PIPE
        process = Child(command, env=environ, stdin=pipe, stdout=pipe, stderr=pipe)
        self._process = process
        try:
            if self._closed:  # while it was being started
                process.hang_up()
            niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            if niceness > 0 or not urgent:  # `calm` may have come meanwhile
                self.lower_priority(niceness)
            request = json.dumps({"paths": list(paths), **self._wanted})
            out, error = process.talk(request.encode(), limit_s)
            if self._cancelled:
                raise InterruptedError("the verification was given up")
        finally:
            self._process = None
            process.end()
        lines = out.decode("utf-8", "replace").splitlines()
        return (
            [_object(line) for line in lines],
            error.decode("utf-8", "replace"),
            process.returncode,
        )


def _yield(process: psutil.Process, niceness: int) -> None:
    """Let it be so nice, and everybody else read first, where the system knows such a thing."""
    with suppress(psutil.Error, OSError):  # it is over
        for thread in process.threads():
            os.setpriority(os.PRIO_PROCESS, thread.id, niceness)
    with suppress(psutil.Error, AttributeError, OSError):
        process.ionice(psutil.IOPRIO_CLASS_IDLE)


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _ending(code: int, told: Sequence[str], error: str) -> tuple[bool | None, str]:
    """Return verdict and sentence for a verifier that gave no answer."""
    if told:
        return None, told[0]
    if -code in CRASHES:
        return False, f"reading it crashes a process: {signal.strsignal(-code)}"
    if code < 0:
        return None, f"the verifier was killed ({signal.strsignal(-code)}), perhaps for memory"
    last = (error.strip().splitlines() or ["no word"])[-1]
    return None, f"the verifier ended with exit code {code}: {last[:200]}"
