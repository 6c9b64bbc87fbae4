"""Reports of a run: its start, what can be done in it, its newest status, a missing probe, and how
processes of the job ended.

Of those ends there are three sources. A process that ends with an error writes
`failure.<pid>.<ns>.json` beside the probe's marks. A fatal signal makes Python dump its stacks into
the mark `boot.<pid>`. A process that ended by a signal and left neither is known by its return
code, and a rank below a launcher by what the launcher recorded of it. The files are the job's, so
nothing in them is trusted: sizes and types are checked, control characters are taken out.
"""

from __future__ import annotations

import glob
import json
import os
import re
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from .. import system
from ..core.incident import PROBATION
from ..core.model.decisions import Decision
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
from ..core.model.payload import Json, Payload
from ..errors import SegmentError, StoreError, disk_full_reason
from ..notifiers.heartbeat import Vitals
from ..notifiers.outbox import Trouble
from ..store import files
from ..store.recorder import Recorder
from ..store.run_directory import IDENTITY, RunDir
from . import status
from .controller import Control
from .host import OomCounters
from .identity import (
    MAX_DIFFERENCES,
    Difference,
    Identity,
    RecordedIdentity,
    compare_identities,
    describe_differences,
)
from .logs import LogFiles
from .processor import METRICS, PROGRESS, EventProcessor
from .segment_reader import ProbeStatus, RankView
from .settings import Settings
from .status import format_capabilities, is_rollback_known, list_capabilities
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
        known_names: names of the records that an earlier supervisor took.
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

    def on_launch(self) -> None:
        """Another process is the job: what is there already is of an earlier one."""
        self._pids.clear()
        self._ranks.clear()
        self._world = 1
        self._others = 0

    def poll(self, now_ns: int) -> list[Notice]:
        """Return what was recorded since the last call, if the directory changed."""
        return self._records(now_ns) if self._change.is_listing_due(now_ns) else []

    def on_exit(
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
            failure = replace(failure, type=system.signal_name(-failure.returncode), at_ns=now_ns)
        killed = failure.type == "SIGKILL" or "killed by signal: Killed" in failure.message
        if killed and (oom := self._counters.describe_kills()):
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


TICK_NS = 1_000_000_000
IDENTITY_S = 1.0  # for what is still being read of a job that has ended; project default
SETTLED_S = 60.0  # what can be done is said in the first minute; project default
# Behind it the status is written so often while nothing is decided: it costs a millisecond.
STATUS_NS = 3_000_000_000
# A job that makes no step is told when it has not worked for so long, and in any case so long after
# its launch: if it does not import torch, which it may never do, and if it does. Project defaults.
IDLE_START_S, PREPARING_S, STARTING_S = 120.0, 900.0, 3600.0


def first_step_deadline_s(marks: Collection[str], worked_s: float) -> float:
    """Return how long after its launch a job is to have made a step.

    Args:
        marks: names of the probe's marks (`boot`, `armed`, `off`).
        worked_s: until when after its launch it has used CPU, files or a device.
    """
    longest = STARTING_S if "armed" in marks else PREPARING_S if "boot" in marks else 0.0
    return max(IDLE_START_S, min(longest, worked_s + IDLE_START_S))


class StatusWriter:
    """Writes `state.json`, says once per launch that no probe reports, and why the job ended."""

    def __init__(
        self,
        settings: Settings,
        processor: EventProcessor,
        recorder: Recorder,
        counters: OomCounters,
    ) -> None:
        self._settings = settings
        self._processor = processor
        self._recorder = recorder
        self._tier = settings.tier
        self._launched_ns, self._worked_s = 0, 0.0
        self._is_reported = False
        self._first_frame_ns = self._next_ns = 0
        self._shown: Decision | None = None  # the newest decision that the status has
        past = settings.past
        self._can: Mapping[str, str] = {}
        self._failures = FailureRecords(
            settings.run.marks_path,
            self._failure_classes,
            counters,
            lambda: self._processor.state.job.pids,
            () if past is None else past.taken.failures,
        )
        logs = [*settings.policy.job.logs, *map(_pattern, settings.outputs)]
        self._logs = LogFiles(logs, Path.cwd(), self._failure_classes)
        self._channels: Sequence[str] = settings.facts.get("channels", ())
        self._identity = _LaunchIdentity(settings, processor, recorder)

    def on_start(self, pid: int) -> None:
        """Write down what was started."""
        policy = self._processor.policy
        facts: dict[str, Any] = {
            "argv": list(self._settings.argv),
            "pid": pid,
            "policy": policy.name,
            "policy_digest": policy.digest,
            "mode": policy.mode,
            "tier": self._settings.tier,
            **self._settings.facts,
        }
        self._recorder.note("run_start", -1, "the job was started", facts)

    def on_launch(self, at_ns: int, *, reported: bool = False) -> None:
        """A process was launched; `reported`: a missing probe was reported already."""
        self._launched_ns, self._is_reported, self._worked_s = at_ns, reported, 0.0
        self._failures.on_launch()
        self._logs.on_launch()
        self._identity.launched()

    def report_job_end(
        self, pid: int, returncode: int, now_ns: int, ends: Mapping[int, End]
    ) -> None:
        """The job's first process ended: report why, as far as anything was recorded."""
        self.check_probe(now_ns, last=True)
        for notice in self._failures.on_exit(pid, returncode, now_ns, ends):
            self._processor.process(notice)
        self._report_logs(now_ns, last=True)
        self._settings.identity.finish_reading(IDENTITY_S)

    def _report_logs(self, now_ns: int, *, last: bool = False) -> None:
        for failure in self._logs.poll(now_ns, last=last):
            data = {**asdict(failure), "record": failure.kind}
            self._processor.process(
                Notice(now_ns, FAILURE_NOTICE, failure.text, data=Payload(data))
            )

    def _failure_classes(self) -> tuple[FailureClass, ...]:
        from ..catalog.loader import failure_classes  # most jobs end well

        return failure_classes(self._processor.policy.job.failures)

    def check_probe(
        self, now_ns: int, works: Callable[[], bool] = lambda: False, *, last: bool = False
    ) -> None:
        """Tell why nothing was seen, when a probe should have reported by now; `last`: at all.

        Args:
            works: returns whether the job uses CPU, files or a device; asked until it steps.
        """
        for notice in self._failures.poll(now_ns):
            self._processor.process(notice)
        self._report_logs(now_ns)
        elapsed_s = (now_ns - self._launched_ns) / 1e9
        is_known = self._settings.tier == "T0" and elapsed_s > TICK_NS / 1e9
        if self._is_reported or self._processor.names:
            return
        marks = {path.name.partition(".")[0] for path in self._settings.run.marks_path.glob("*")}
        if works():
            self._worked_s = elapsed_s
        if not (last or is_known or elapsed_s > first_step_deadline_s(marks, self._worked_s)):
            return
        self._is_reported, self._tier = True, "T0"
        message = status.explain_missing_probe(marks, self._settings.tier_reason)
        if message is not None:
            self._processor.process(Notice(now_ns, "no-probe", message))

    def write(self, control: Control, now_ns: int, *, over: bool = False) -> None:
        """Write the newest status if it is due, and say once what can be done in this job."""
        try:
            ranks = control.ranks()
        except SegmentError:
            ranks = {}
        leader = ranks[min(ranks)] if ranks else None
        probe = None if leader is None or not leader.document else leader.status
        make = self._processor.views.make
        for notice in (
            make("comparison of the launches", self._identity.poll, ranks, now_ns),
            make("line of what can be done", self._report_once, probe, now_ns),
        ):
            if notice is not None:
                self._processor.process(notice)
        last = self._processor.last
        if over or last is not self._shown or now_ns >= self._next_ns:
            settled = now_ns - self._launched_ns > SETTLED_S * 1e9
            self._shown, self._next_ns = last, now_ns + STATUS_NS * settled
            make("status", self._write, ranks, probe, now_ns)
        if self._settings.metrics is not None:
            policy, state = self._processor.policy, self._processor.state
            trouble = self._recorder.trouble
            make(METRICS, self._settings.metrics.publish, policy, state, now_ns, trouble)

    def _write(self, ranks: Mapping[int, RankView], probe: ProbeStatus | None, now_ns: int) -> None:
        settings, policy = self._settings, self._processor.policy
        views, progress = self._processor.views, self._processor.training.status
        training = views.make(PROGRESS, progress, policy.job.steps, now_ns, probe)
        newest = msgspec.structs.replace(
            status.build_status(
                policy,
                self._processor.state,
                ranks,
                wall=system.wall_time(),
                now_ns=now_ns,
                tier="T1" if self._processor.names else self._tier,
                last=self._processor.last,
                trouble=self._recorder.trouble,
            ),
            channels=_broken(self._processor.broken_channels(), now_ns),
            can={} if probe is None else self._can,
            space=self._recorder.shortage(settings.run.path),
            training=training or status.Training(),
            messages_to=self._channels,
            messages_waiting=self._processor.waiting_messages(),
            heartbeat=None if settings.heartbeat is None else settings.heartbeat.health(),
            failed_views=dict(views.failed) or None,
        )
        try:
            settings.run.write_json(status.FILE, settings.redactor.tree(newest.document()))
        except StoreError as error:
            if (shortage := disk_full_reason(error)) is None:
                raise
            self._recorder.on_full(shortage)  # the record has a reserve

    def _report_once(self, probe: ProbeStatus | None, now_ns: int) -> Notice | None:
        """Find out what can be done, and return it once.

        That is when the savepoints have shown it, after a minute in any case.
        """
        policy, state = self._processor.policy, self._processor.state
        self._can = list_capabilities(policy, state, probe or ProbeStatus(), self._channels)
        if state.job.lost is not None or state.step < 0 or probe is None:
            return None
        self._first_frame_ns = self._first_frame_ns or now_ns
        elapsed_s = (now_ns - self._first_frame_ns) / 1e9
        if elapsed_s < SETTLED_S and not is_rollback_known(policy, state, probe):
            return None
        text = format_capabilities(self._can)
        self._settings.print_line(self._settings.redactor.text(f"supervise: {text}"))
        return Notice(now_ns, "capabilities", text)


class _LaunchIdentity:
    """Records what each launch consists of, and reports what differs from the launch before."""

    def __init__(self, settings: Settings, processor: EventProcessor, recorder: Recorder) -> None:
        self._settings = settings
        self._processor = processor
        self._recorder = recorder
        self._previous: RecordedIdentity | None = None
        self._launches = 0
        if (path := settings.run.path if settings.past else settings.previous) is not None:
            with suppress(StoreError, ValueError):
                document = RunDir.open(path).read_json(IDENTITY)
                self._previous = msgspec.convert(document, RecordedIdentity)

    def launched(self) -> None:
        """A process was launched, or goes on under another supervisor."""
        past, previous, self._launches = self._settings.past, self._previous, self._launches + 1
        adopted = past.launched if past is not None and self._launches == 1 else None
        if previous is not None and adopted is not None and previous.attempt == adopted.attempt:
            self._settings.identity.recall(previous.identity)
        else:
            self._settings.identity.start()

    def poll(self, ranks: Mapping[int, RankView], now_ns: int) -> Notice | None:
        """Record the identity once it is known; return what is to be told of it."""
        if ranks and self._processor.state.step >= 0:
            self._settings.identity.on_first_step(ranks[min(ranks)].pid)
        identity = self._settings.identity.poll()
        if identity is None:
            return None
        plain = self._settings.redactor.tree(msgspec.to_builtins(identity))
        return self._record(msgspec.convert(plain, Identity), now_ns)

    def _record(self, identity: Identity, now_ns: int) -> Notice | None:
        run, state, previous = self._settings.run, self._processor.state, self._previous
        self._previous = RecordedIdentity(run.id, state.job.launched, identity)
        document = msgspec.to_builtins(self._previous)
        text = "code, packages, data and machine of this start of the job"
        changes: list[Difference] = []
        comparison = {}
        if previous is not None:
            changes = compare_identities(previous.identity, identity)
            other_run = "" if previous.run == run.id else f" of run {previous.run}"
            launch = f"attempt {previous.attempt}{other_run}"
            text = f"the job is the same as in {launch}"
            if changes:
                text = f"the job differs from {launch}: {describe_differences(changes)}"
            plain_changes = msgspec.to_builtins(changes[:MAX_DIFFERENCES])
            comparison = {"since": launch, "differs": plain_changes}
        self._recorder.note("identity", state.step, text, document | comparison)
        with suppress(StoreError):  # a cache: the audit log has it
            run.write_json(IDENTITY, document)
        if not changes:
            return None
        about: dict[str, Json] = {"differs": comparison["differs"], "number": len(changes)}
        return Notice(now_ns, "identity-changed", text, data=Payload(about))


def _pattern(path: Path) -> str:
    return glob.escape(str(path))


def run_vitals(processor: EventProcessor, run_id: str) -> Vitals:
    """Return how the run is, for its heartbeat. Any thread."""
    state = processor.state
    incident, trouble = state.incident, processor.lost_to
    if incident is not None and incident.severity == "SEV0" and incident.phase != PROBATION:
        trouble = f"{incident.id} SEV0 {incident.headline}".rstrip()
    return Vitals(f"{run_id}: step {state.step}, {state.machine}", processor.progress_ns, trouble)


def _broken(
    troubles: Iterable[Trouble], now_ns: int
) -> dict[str, status.UndeliveredMessages] | None:
    """Return what is wrong with each channel, None while all work."""
    broken = {
        trouble.channel: status.UndeliveredMessages(
            trouble.undelivered, system.wall_time(now_ns / 1e9 - trouble.since_s), trouble.error
        )
        for trouble in troubles
    }
    return broken or None


def add_broken_channels_to_status(run: RunDir, troubles: Iterable[Trouble]) -> None:
    """Put the channels into the newest status: it was written before the last messages went out."""
    broken = _broken(troubles, system.monotonic_ns())
    with suppress(StoreError):  # a view; the audit log has what became of each message
        newest = status.Status.read(run)
        if newest is not None and (newest.channels or broken):
            newest = msgspec.structs.replace(newest, channels=broken)
            run.write_json(status.FILE, newest.document())
