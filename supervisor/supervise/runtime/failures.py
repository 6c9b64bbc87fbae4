"""Notices from the records that processes of the job wrote of their own end.

Three sources. A process that ends with an error writes `failure.<pid>.<ns>.json` beside the probe's
marks. A fatal signal makes Python dump its stacks into the mark `boot.<pid>`. A process that ended
by a signal and left neither is known by its return code, and a rank below a launcher by what the
launcher recorded of it.

The files are the job's, so nothing in them is trusted: sizes and types are checked, control
characters are taken out.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..core.model.events import Notice
from ..core.model.failure import (
    EXCEPTION,
    EXIT,
    FAILURE_NOTICE,
    LAUNCHER,
    SIGNAL,
    THREAD_FAILURE,
    Failure,
    FailureClass,
    classify_failure,
)
from ..core.model.payload import Payload
from ..store import files
from .host import OomCounters
from .watches import DirectoryChange

_RECORD = re.compile(r"failure\.\d+\.\d+\.json")
_BOOT = re.compile(r"boot\.(\d+)")
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_LIBRARY = re.compile(r"[/\\](site|dist)-packages[/\\]|[/\\]lib[/\\]python3|^<frozen ")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_SIGNALS = {  # as faulthandler calls them
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
# What ends ranks when another one has failed: their launcher, a scheduler, a person.
ASKED = frozenset(
    -number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
)
FATAL = frozenset(  # they end a process that does nothing about them, and nobody sends them kindly
    -number
    for number in (
        signal.SIGKILL,
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGILL,
        signal.SIGFPE,
    )
)
MOST = 64  # ranks, and of other programs of the job, whose ends one launch reports
MAX_BYTES = 65536
TEXT_CHARS, TRACE_CHARS = 2100, 6100
_TEXTS = ("type", "message", "file", "function", "within", "thread", "traceback")


End = tuple[int, int | None, str]  # rank, returncode, last message; None: it recorded none


class FailureRecords:
    """The failures of one run, each reported once.

    Args:
        marks: directory of the probe's marks.
        classes: returns the classes that count now.
        counters: of kills by the kernel.
        leading: returns the pids of the job's first process and of those that trained.
        known: names of the records that an earlier supervisor took.
    """

    def __init__(
        self,
        marks: Path,
        classes: Callable[[], tuple[FailureClass, ...]],
        counters: OomCounters,
        leading: Callable[[], Collection[int]],
        known_names: Collection[str] = (),
    ) -> None:
        self._marks = marks
        self._change = DirectoryChange(marks)
        self._classes = classes
        self._counters = counters
        self._leading = leading
        self._known = set(known_names)
        self._pids: set[int] = set()  # of this launch, whose end is known
        self._ranks: dict[int, int] = {}  # of this launch, by pid, as far as known
        self._world = 1  # of this launch, at least
        self._others = 0  # of them, those that are no rank

    def launched(self) -> None:
        """Another process is the job: what is there already is of an earlier one."""
        self._pids.clear()
        self._ranks.clear()
        self._world = 1
        self._others = 0

    def poll(self, now_ns: int) -> list[Notice]:
        """Return what was recorded since the last call, if the directory changed."""
        return self._records(now_ns) if self._change.due(now_ns) else []

    def ended(
        self, pid: int, returncode: int, now_ns: int, ends: Mapping[int, End]
    ) -> list[Notice]:
        """Return all that is known of the job's end and was not reported.

        Args:
            pid, returncode: of its first process. ends: what those that trained recorded, by pid.
        """
        self._ranks = {ended_pid: end[0] for ended_pid, end in ends.items()}
        notices = [*self._records(now_ns), *self._fatal(now_ns)]
        for ended_pid, (rank, code, text) in ends.items():
            if code and text and ended_pid not in self._pids:  # its record could not be written
                notices += self._report(
                    f"end.{ended_pid}", _last_message(rank, ended_pid, code, text), now_ns
                )
        if returncode < 0 and returncode not in ASKED and pid not in self._pids:
            notices += self._signalled(pid, returncode, now_ns)
        elif 128 - returncode in FATAL and self._pids.isdisjoint(self._leading()):
            # So a shell reports a signal that ended what it waited for.
            silent = [ended_pid for ended_pid, (_, code, _) in ends.items() if code is None]
            ended = silent[0] if len(silent) == 1 else pid
            notices += self._signalled(ended, 128 - returncode, now_ns)
        return notices

    def _signalled(self, pid: int, returncode: int, now_ns: int) -> list[Notice]:
        failure = Failure(SIGNAL, rank=self._ranks.get(pid), pid=pid, returncode=returncode)
        return self._report(f"exit.{pid}", failure, now_ns)

    def _records(self, now_ns: int) -> list[Notice]:
        notices: list[Notice] = []
        for name in sorted(_names(self._marks)):
            if not _RECORD.fullmatch(name) or name in self._known:
                continue
            data = _read_json(self._marks / name)
            if data is None:
                self._known.add(name)
                continue
            ranks = list(_ranks(data))
            children = tuple(rank.pid for rank in ranks)
            notices += self._report(name, replace(_failure(data), children=children), now_ns)
            self._ranks.update(
                {reported.pid: reported.rank for reported in ranks if reported.rank is not None}
            )
            self._world = max([self._world, *(reported.world_size for reported in ranks)])
            if any((rank.returncode or 0) < 0 for rank in ranks):
                notices += self._fatal(now_ns)  # what Python wrote of a signal says more
            for rank in ranks:
                if rank.pid not in self._pids and rank.returncode not in ASKED:
                    notices += self._report(f"{name}:{rank.pid}", rank, now_ns)
        return notices

    def _fatal(self, now_ns: int) -> Iterator[Notice]:
        for name in sorted(_names(self._marks)):
            match = _BOOT.fullmatch(name)
            if match is None or name in self._known:
                continue
            dump = _read_text(self._marks / name)
            fatal = _FATAL.search(dump)
            if fatal is None:
                continue
            pid = int(match[1])
            type_ = _SIGNALS.get(fatal[1], fatal[1])
            frames = _FRAME.findall(dump.partition("Current thread")[2].partition("\n\n")[0])
            own_frames = [frame for frame in frames if not _LIBRARY.search(frame[0])]
            file, line, function = (own_frames or frames or [("", "0", "")])[0]
            failure = Failure(
                SIGNAL,
                type_,
                file=_display_path(file),
                line=int(line),
                function=function,
                rank=self._ranks.get(pid),
                pid=pid,
                at_ns=now_ns,
                traceback=dump[:TRACE_CHARS].replace(f"{Path.home()}/", "~/"),
            )
            yield from self._report(name, failure, now_ns)

    def _report(self, name: str, failure: Failure, now_ns: int) -> list[Notice]:
        self._known.add(name)
        leading = failure.pid in self._leading()
        self._others += not leading
        if self._others > MOST and not leading:  # programs that are meant to fail
            return []
        if failure.kind != THREAD_FAILURE:
            self._pids.add(failure.pid)
        if failure.kind == SIGNAL and not failure.type and failure.returncode is not None:
            failure = replace(failure, type=_signal(-failure.returncode), at_ns=now_ns)
        killed = failure.type == "SIGKILL" or "killed by signal: Killed" in failure.message
        if killed and (oom := self._counters.killed()):
            message = f"{failure.message.splitlines()[0]}; {oom}" if failure.message else oom
            failure = replace(failure, message=message)
        world_size = max(failure.world_size, self._world, len(self._ranks))
        failure = replace(failure, leading=leading, world_size=world_size)
        failure = classify_failure(failure, self._classes())
        data = {**asdict(failure), "record": name}
        return [Notice(now_ns, FAILURE_NOTICE, failure.text, rank=failure.rank, data=Payload(data))]


def _last_message(rank: int, pid: int, code: int, text: str) -> Failure:
    """Return the failure that the last message in a segment names: `type: message (file:line)`."""
    clean = _clean(text, TEXT_CHARS)
    match = re.search(r" \((.+):(\d+)\)$", clean)
    name, _, message = (clean[: match.start()] if match else clean).partition(": ")
    file, line = (match[1], int(match[2])) if match else ("", 0)
    failure = Failure(EXCEPTION, name, message, file, line, rank=rank, pid=pid, returncode=code)
    if message or match:
        return failure
    return replace(failure, kind=EXIT, type="SystemExit", message=clean)


def _failure(data: Mapping[str, Any]) -> Failure:
    texts: dict[str, Any] = {name: _clean(str(data.get(name) or ""), TEXT_CHARS) for name in _TEXTS}
    texts["traceback"] = _clean(str(data.get("traceback") or ""), TRACE_CHARS)
    kind = data.get("kind")
    is_known = kind in (EXCEPTION, EXIT, THREAD_FAILURE, LAUNCHER)
    return Failure(
        kind=str(kind) if is_known else EXCEPTION,
        line=_int(data.get("line")) or 0,
        rank=_int(data.get("rank")),
        world_size=_int(data.get("world_size")) or 1,
        pid=_int(data.get("pid")) or 0,
        at_ns=_int(data.get("at_ns")) or 0,
        returncode=_int(data.get("code")),
        **texts,
    )


def _ranks(data: Mapping[str, Any]) -> Iterator[Failure]:
    """Yield the ranks that a launcher saw fail."""
    rows = data.get("ranks")
    rows = rows[:MOST] if isinstance(rows, list) else []
    for row in rows:
        code = _int(row.get("code")) if isinstance(row, dict) else None
        if code is None:
            continue
        kind = SIGNAL if code < 0 else EXIT
        name, _, message = _clean(str(row.get("message") or ""), TEXT_CHARS).partition(": ")
        if kind == EXIT and message and re.fullmatch(r"[\w.]+", name):
            kind = EXCEPTION
        else:
            name, message = "", _clean(str(row.get("message") or ""), TEXT_CHARS)
        yield Failure(
            kind,
            name or ("SystemExit" if kind == EXIT else ""),
            message or (f"code {code}" if kind == EXIT else ""),
            _clean(str(row.get("file") or ""), TEXT_CHARS),
            _int(row.get("line")) or 0,
            rank=_int(row.get("rank")),
            world_size=max(2, len(rows)),
            pid=_int(row.get("pid")) or 0,
            at_ns=_int(data.get("at_ns")) or 0,
            returncode=code,
        )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def _display_path(path: str) -> str:
    """Return a path as the probe would: relative where it lies below here, else with `~`."""
    for base, _display_path in ((Path.cwd(), ""), (Path.home(), "~/")):
        if path.startswith(f"{base}/"):
            return _display_path + path.removeprefix(f"{base}/")
    return path


def _clean(text: str, room: int) -> str:
    return _CONTROL.sub("", text[:room])


def _int(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < 2**63 else None


def _read_text(path: Path) -> str:
    try:
        with os.fdopen(files.open_file(path), "rb") as file:
            return _CONTROL.sub("", file.read(MAX_BYTES).decode("utf-8", "replace"))
    except OSError:  # removed, or not ours
        return ""


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(_read_text(path))
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _names(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries]
    except OSError:  # not made yet, or removed at the end
        return []
