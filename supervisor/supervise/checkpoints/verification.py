"""Verifies checkpoints in a process of its own, and pins those that are good.

The loop calls none of this directly. See `retention` for the locks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from .. import system
from ..core.model.checkpoint_registry import UNKNOWN, WEIGHTS_ONLY
from ..errors import StoreError
from ..store import files
from ..system import Child
from . import discovery, registry
from .registry import BAD, COPIED, FOUND, UNVERIFIED, VERIFIED, Entry
from .retention import Retention

LIMIT_S = 900.0  # per checkpoint, plus one second per SLOWEST bytes; project defaults
SLOWEST = 20_000_000
# Signals that reading a damaged file may cause; others come from outside.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
STATES = {True: VERIFIED, False: BAD, None: UNVERIFIED}


@dataclass(frozen=True)
class Verdict:
    """Result of a verification.

    Attributes:
        ok: None if it could not be verified.
        problems: reasons, one sentence each.
        found: the verifier's description, see `supervise_offline.checkpoint.verify`.
        environment: of the interpreter; empty if it did not start.
    """

    ok: bool | None
    problems: tuple[str, ...] = ()
    found: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)


class VerifierProcess:
    """Runs the verifier in the job's interpreter, one process at a time.

    It is a process of its own because reading a damaged file may crash, hang or fill memory. It
    runs at the niceness of the calling thread and sees no accelerator.

    Args:
        wanted: some of `load`, `finite`, `optimizer`.
    """

    def __init__(self, wanted: Iterable[str], limit_s: float = LIMIT_S) -> None:
        self._wanted = dict.fromkeys(wanted, True)
        self._wanted["load"] = bool(self._wanted)
        self._limit_s = limit_s
        self._process: Child | None = None
        self._closed = self._cancelled = False
        spec = importlib.util.find_spec("supervise_offline")
        folders = spec.submodule_search_locations if spec is not None else None
        self._program = str(Path(*folders, "checkpoint")) if folders else ""

    def verify(self, path: str, size: int, python: str | None, *, urgent: bool = False) -> Verdict:
        """Verify one checkpoint of `size` bytes. Blocks; never raises for its content.

        Raises:
            InterruptedError: see `cancel`.

        Args:
            python: the job's interpreter; ours if None or not executable here.
            urgent: no job is running, so the disk is free.
        """
        if python is None or not os.access(python, os.X_OK):
            python = sys.executable
        limit_s = self._limit_s + size / SLOWEST
        try:
            lines, error, code = self._run(
                [python, "-I", self._program], [path], limit_s, urgent=urgent
            )
        except InterruptedError:  # is an OSError too
            raise
        except OSError as failed:
            return Verdict(None, (f"the verifier could not be started: {failed}",))
        except subprocess.TimeoutExpired:
            return Verdict(None, (f"the verifier took longer than {limit_s:.0f} s",))
        environment: dict[str, Any] = lines[0].get("environment", {}) if lines else {}
        found = next((r for r in lines if r.get("path") == path), None)
        if found is not None:
            problems = (*found["problems"], *found["unread"])
            return Verdict(found["ok"], problems, found, environment)
        ok, problem = _explain_exit(code, [r["error"] for r in lines if "error" in r], error)
        return Verdict(ok, (problem,), {}, environment)

    def close(self) -> None:
        """End a running verification; the waiting caller returns."""
        self._closed = True
        if (process := self._process) is not None:
            process.hang_up()

    def cancel(self) -> None:
        """Cancel the verification under way. Thread-safe."""
        process = self._process
        if process is not None and process.poll() is None:
            self._cancelled = True
            process.hang_up()

    def work_done(self) -> float:
        """Return what was read and computed until now, 1 for 1 MB or 0.1 s of CPU. Thread-safe.

        Of the verification under way, and of this process, which copies what is good.
        """
        done = 0.0
        with suppress(psutil.Error, AttributeError, OSError):  # ended, or a system without counts
            done += psutil.Process().io_counters().write_chars / 1e6  # we read /proc for this
            if (process := self._process) is not None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    times = child.cpu_times()
                    done += child.io_counters().read_chars / 1e6 + 10.0 * (
                        times.user + times.system
                    )
        return done

    def lower_priority(self, niceness: int) -> None:
        """Set the niceness of the verification under way. Thread-safe."""
        if (process := self._process) is not None:
            with suppress(psutil.Error, OSError):  # already ended
                reaper = psutil.Process(process.pid)
                _set_niceness(reaper, niceness)  # first: later children inherit it
                for child in reaper.children(recursive=True):
                    _set_niceness(child, niceness)

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
            if self._closed:  # during the start
                process.hang_up()
            niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            if niceness > 0 or not urgent:  # also if `lower_priority` was called during the start
                self.lower_priority(niceness)
            request = json.dumps({"paths": list(paths), **self._wanted})
            out, error = process.talk(request.encode(), limit_s)
            if self._cancelled:
                raise InterruptedError("the verification was cancelled")
        finally:
            self._process = None
            process.end()
        lines = out.decode("utf-8", "replace").splitlines()
        return (
            [_object(line) for line in lines],
            error.decode("utf-8", "replace"),
            process.returncode,
        )


def _set_niceness(process: psutil.Process, niceness: int) -> None:
    """Set the niceness of all threads, and idle disk priority where the system supports it."""
    with suppress(psutil.Error, OSError):  # already ended
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


def _explain_exit(code: int, errors: Sequence[str], error: str) -> tuple[bool | None, str]:
    """Return `ok` and a sentence for a verifier that ended without a result."""
    if errors:
        return None, errors[0]
    if -code in CRASHES:
        return False, f"reading it crashes a process: {signal.strsignal(-code)}"
    if -code == signal.SIGALRM:
        return None, "reading it came to a halt: the verifier made no progress for two minutes"
    if code < 0:
        return None, f"the verifier was killed ({signal.strsignal(-code)}), perhaps out of memory"
    last = (error.strip().splitlines() or ["no output"])[-1]
    return None, f"the verifier ended with exit code {code}: {last[:200]}"


class CheckpointVerifier:
    """Verifies the checkpoints of a register, one at a time, and pins the good ones.

    Args:
        wanted: what must hold of one, see `core.model.policy.Checkpoints`.
        facts, code, data: for manifests, see `manifest.describe` and `manifest.inputs`.

    Attributes:
        current: what is being verified, None for nothing.
    """

    def __init__(
        self,
        retention: Retention,
        cwd: Path,
        wanted: Sequence[str],
        *,
        limit_s: float = LIMIT_S,
        facts: Mapping[str, Any],
        code: Callable[[], Mapping[str, Any]],
        data: Sequence[str],
    ) -> None:
        self.process = VerifierProcess(wanted, limit_s)
        self._kept, self._cwd, self._facts, self._data = retention, cwd, facts, data
        self._code = code
        self._notifications = retention.notifications
        self._tried: set[str] = set()
        self.current: Entry | None = None
        self._handed_over: Entry | None = None  # its copy stays for another thread

    def hand_over(self, before: int) -> None:
        """Cancel the verification under way; a copy of a checkpoint before this step stays."""
        with self._kept.lock:
            entry = self.current
            self._handed_over = entry if entry is not None and entry.earliest < before else None
        self.process.cancel()

    def release_copies(self) -> None:
        """Drop the copies that were handed over, and nobody took."""
        with self._kept.lock:
            for entry in self._kept.register.entries:
                if entry.state == COPIED:
                    self._kept.release(entry)

    def verify(self, entry: Entry, *, urgent: bool = False, awaited: bool = False) -> None:
        """Verify a complete checkpoint, and pin it if it is good.

        Args:
            urgent: the job has ended: the disk is free, and the job overwrites nothing.
            awaited: the job runs, and a rollback waits for this checkpoint.
        """
        kept = self._kept
        with kept.lock:
            self.current = entry
            link = kept.holds.acquire(entry)
        try:
            self._verify(entry, link, urgent=urgent, awaited=awaited)
        finally:
            with kept.lock:
                self.current = None
                kept.holds.release(entry)

    def _verify(self, entry: Entry, link: Path | None, *, urgent: bool, awaited: bool) -> None:
        kept = self._kept
        often = entry.present and entry.path in kept.overwrites and not kept.holds.exclusive(entry)
        try:
            copy = self._copy(entry) if (often and not urgent) or entry.state == COPIED else None
        except (StoreError, InterruptedError):
            return  # overwritten during the copy
        with kept.lock:
            if entry.state not in (FOUND, COPIED):
                return
            path, seen = entry.path, entry.stamp
        link = link if copy is None else None
        source = str(copy or link or path)
        try:
            verdict = self.process.verify(
                source, entry.bytes, entry.python, urgent=urgent or awaited
            )
        except InterruptedError:
            with kept.lock:
                if entry is not self._handed_over:
                    kept.release(entry)
            return
        unread = verdict.ok is None and not verdict.found and entry.id not in self._tried
        with kept.lock:
            if kept.closed.is_set():
                return
            changed = discovery.stamp(path) != seen
            linked = copy is not None and kept.link and discovery.stamp(source) != seen
            if link is None:
                failed = linked or (changed and (copy is None or not verdict.ok))
            else:  # the job may have been adding files to a directory
                failed = changed and not verdict.ok and len(seen) > 1
                failed = failed or not kept.holds.intact(entry, seen)
            if failed:
                kept.release(entry, overwritten=True)  # it may have been read half written
                return
            if unread:  # out of memory or time: a second try may succeed
                self._tried.add(entry.id)
            if unread or entry.state not in (FOUND, COPIED):
                kept.release(entry)
                return
            entry.state = COPIED  # while it is being pinned
            entry.problems, entry.verified = list(verdict.problems), system.wall()
            entry.describe(verdict.found)
            if entry.resumable == WEIGHTS_ONLY and discovery.has_optimizer_alongside(path):
                entry.resumable = UNKNOWN  # a set of files
        if verdict.ok and not self._pin(entry, verdict.environment, link, copied=copy is not None):
            return
        with kept.lock:
            lost = (now := discovery.stamp(path)) != seen and not entry.pinned
            lost = lost and (verdict.ok is True or link is None)
            if lost or entry.state != COPIED:
                kept.release(entry, overwritten=lost)
                return
            entry.state = STATES[verdict.ok]
            kept.overwrites.on_verdict(path, overwritten=now not in (seen, None))
            kept.write()  # before the report: an adopting supervisor must know it too
            self._notifications.verdict(entry, verdict.ok)
        if copy is not None and not verdict.ok:
            kept.pins.drop(entry)

    def _copy(self, entry: Entry) -> Path | None:
        """Copy an entry before its verification; None: it must be verified in place.

        From the first copied byte on, the next save is another entry.

        Raises:
            StoreError: it was overwritten meanwhile. InterruptedError: see `PinStore.copy`.
        """
        kept = self._kept
        try:
            with kept.disk:
                if entry.state == COPIED and (made := kept.pins.unverified(entry)) is not None:
                    return made  # handed over
                if not kept.has_room(entry):
                    return None
                with kept.lock:
                    entry.state = COPIED if entry.state == FOUND else entry.state
                return kept.pins.copy(entry)
        except (StoreError, OSError) as error:
            with kept.lock:
                kept.release(entry, overwritten=isinstance(error, StoreError))
            if isinstance(error, (StoreError, InterruptedError)):
                raise
            if entry.state == FOUND:
                self._notifications.note(f"checkpoints cannot be pinned: {error}", once="pin")
            return None

    def _pin(
        self, entry: Entry, environment: Mapping[str, Any], link: Path | None, *, copied: bool
    ) -> bool:
        """Pin a good checkpoint. False: it changed or there was no time; verify it again.

        A good checkpoint that cannot be pinned stays good until the job changes its files.

        Args:
            link: path of its hold, if held. copied: a copy was verified; it becomes the pin.
        """
        kept = self._kept
        exclusive = link is not None and kept.holds.exclusive(entry)  # no copy is needed
        try:
            with kept.disk:
                if not (copied or exclusive or kept.has_room(entry)):
                    return True
                if copied:
                    kept.pins.keep(entry)
                else:
                    kept.pins.pin(entry, link, link=exclusive)
                with kept.lock:
                    entry.pinned = True
                inputs = registry.inputs(self._data, self._cwd)
                for name in (name for name, sha in inputs.items() if sha is None):
                    self._notifications.note(
                        f"job.manifest: {name} cannot be read below {self._cwd}: the manifests of "
                        "this run's checkpoints lack its hash",
                        once=f"manifest {name}",
                    )
                content = registry.describe(entry, self._facts, self._code(), environment, inputs)
                text = json.dumps(content, indent=1, default=str) + "\n"
                path = kept.pins.folder(entry) / "manifest.json"
                files.replace(path, text.encode(), durable=True)
        except (StoreError, InterruptedError) as error:
            with kept.lock:
                kept.release(entry, overwritten=isinstance(error, StoreError))
            return False
        except OSError as error:
            self._notifications.note(f"checkpoints cannot be pinned: {error}", once="pin")
        return True

    def retest(self) -> None:
        """Verify the newest pinned copy again, as a test of a restore."""
        kept = self._kept
        with kept.lock:
            pinned = [e for e in kept.register.entries if e.pinned and e.state == VERIFIED]
        if not pinned:
            return
        entry = pinned[-1]
        try:
            verdict = self.process.verify(str(kept.pins.data(entry)), entry.bytes, entry.python)
        except InterruptedError:
            return
        found = {name: file["sha256"] for name, file in verdict.found.get("files", {}).items()}
        with kept.lock:
            if kept.closed.is_set() or not entry.pinned:
                return
            if verdict.ok is False or (found and found != entry.hashes):
                problems = verdict.problems or ("its files are not those that were verified",)
                entry.state = BAD
                entry.problems = [f"the pinned copy: {problem}" for problem in problems]
            elif verdict.ok:
                entry.verified = system.wall()
            kept.write()
            if entry.state == BAD:
                self._notifications.bad(entry)
