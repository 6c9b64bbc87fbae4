"""End of a process of the job: an uncaught error, a fatal signal, or a call of `sys.exit`.

A failure enters the engine as a `Notice` of kind `failure` whose data are the fields of `Failure`.
One trouble ends many processes: ranks lose their peers, launchers lose their ranks. And a job may
start programs whose errors it expects, such as one that tries an import. `sort_by_cause` sorts
them, the one that people should read first comes first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal

from .interfaces import AdviceSteps, Step
from .values import Section, describe_key, pattern_mark

FAILURE_NOTICE = "failure"  # of the notice
ALWAYS, ONCE, NEVER = ("always", "once", "never")
EXCEPTION, LOG_FAILURE, SIGNAL = "exception", "log", "signal"
EXIT, THREAD_FAILURE, LAUNCHER = "exit", "thread", "launcher"
_RANKING = (
    EXCEPTION,
    LOG_FAILURE,
    SIGNAL,
    EXIT,
    THREAD_FAILURE,
    LAUNCHER,
)  # best explanation first
RECENT_NS = 60_000_000_000  # before the newest end; of a helper, an older one explains nothing
# The type of the error that torchrun's launcher ends with when it gets SIGTERM or the like; source:
# torch.distributed.elastic.multiprocessing.api.
ASKED_TYPE = "SignalException"
SHOWN_CHARS = 200  # of a message, in one line
SEARCHED_CHARS = 4000  # of a message; a pattern must not meet megabytes
# Those that end jobs, by their number on x86 and ARM; source: signal(7).
SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    10: "SIGUSR1",
    11: "SIGSEGV",
    12: "SIGUSR2",
    13: "SIGPIPE",
    14: "SIGALRM",
    15: "SIGTERM",
    24: "SIGXCPU",
    25: "SIGXFSZ",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """One process, or thread, that ended with an error.

    Attributes:
        kind: `exception`, `signal`, `exit` (a call of `sys.exit`), `thread`, or `launcher` (the
            error of a process that only reports those of its ranks), or `log` (a line of a log).
        type: of the exception, or the name of the signal. message: its text; may be long.
        file, line, function: the innermost place of the job's own code, "" and 0 where unknown.
        within: what raised it, such as a worker of a data loader; "" for the process itself.
        rank: None for a process that is none. world_size: 1 where unknown.
        at_ns: CLOCK_MONOTONIC of its end.
        returncode: as in `subprocess`; None where it is not recorded.
        cls, title, then, command: its class, what that means, what people can do about it, and by
            which command; see `FailureClass`.
        relaunch: whether a start of the job can help: `always`, `once`, `never`.
        leading: of the job's first process, or of one that trained.
        children: pids of the ranks that a launcher saw fail: they count as leading.
        secondary: it follows from the end of another process.
        traceback: its text, of several lines.
    """

    kind: str = EXCEPTION
    type: str = ""
    message: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    within: str = ""
    thread: str = ""
    rank: int | None = None
    world_size: int = 1
    pid: int = 0
    at_ns: int = 0
    returncode: int | None = None
    cls: str = ""
    title: str = ""
    then: str = ""
    command: str = ""
    relaunch: str = ALWAYS
    leading: bool = False
    children: tuple[int, ...] = ()
    secondary: bool = False
    traceback: str = ""

    @property
    def remedy(self) -> AdviceSteps:
        """The steps that people can take about it, () where none are known."""
        return (Step(self.then, self.command),) if self.then else ()

    @property
    def summary(self) -> str:
        """Its error in one line, without its place."""
        line_text = next((line.strip() for line in self.message.splitlines() if line.strip()), "")
        line_text = (
            line_text if len(line_text) <= SHOWN_CHARS else f"{line_text[: SHOWN_CHARS - 1]}…"
        )
        name = "" if self.kind == EXIT and line_text else self.type
        return ": ".join(filter(None, (name, line_text)))

    @property
    def text(self) -> str:
        """Return it in one line: "RuntimeError: out of range at train.py:41 (rank 1)"."""
        origin_text = f" at {self.file}:{self.line}" if self.line else f" in {self.file}"
        origin_text = origin_text if self.file else ""
        details = [self.within, f"thread {self.thread}" if self.thread else ""]
        if self.rank is not None and (self.world_size > 1 or self.rank):
            details.append(f"rank {self.rank}")
        origin = ", ".join(filter(None, details))
        return f"{self.summary}{origin_text}" + (f" ({origin})" if origin else "")


def exit_text(returncode: int | None) -> str:
    """Return "ended with code 1", or "ended with signal 9 (SIGKILL)"."""
    number = -(returncode or 0)
    if number <= 0:
        return f"ended with code {-number}"
    return f"ended with signal {number}" + (f" ({SIGNALS[number]})" if number in SIGNALS else "")


def exit_code_text(code: int | None, *, is_signal: bool) -> str:
    """Return the same of an exit code as a shell has it: behind a signal 128 and its number."""
    return exit_text(128 - (code or 0) if is_signal else code)


def sort_by_cause(failures: Iterable[Failure], ended_ns: int = 0) -> list[Failure]:
    """Return the failures that may explain the end of a job, the one to be read first in front.

    First those of ranks and of the job's first process, and recent lines of logs, then those of
    other programs; what ended of these long before is left out. In both what is known to be a
    consequence comes last, then a launcher's summary, then what ended only a thread; among equals
    the earliest comes first.

    Args:
        ended_ns: when the job ended, 0 while it runs.
    """
    all_failures = list(failures)
    newest = max((failure.at_ns for failure in all_failures), default=0)
    since_ns = max(newest, ended_ns) - RECENT_NS
    listed = {pid for failure in all_failures for pid in failure.children}

    def leads(failure: Failure) -> bool:
        return failure.kind != LAUNCHER and (failure.leading or failure.pid in listed)

    def counts(failure: Failure) -> bool:
        return (leads(failure) and failure.kind != LOG_FAILURE) or failure.at_ns > since_ns

    def key(failure: Failure) -> tuple[bool, bool, int, int]:
        kind = _RANKING.index(failure.kind)
        return not leads(failure), failure.secondary, kind, failure.at_ns

    return sorted(filter(counts, all_failures), key=key)


class FailureClass(Section, frozen=True, dict=True):
    """Failures that mean the same for the run: what to look for, and whether a start can help."""

    id: Annotated[
        str,
        pattern_mark("[a-z][a-z0-9-]{0,63}", "a name of small letters, digits and -"),
        describe_key("name of the class"),
    ]
    title: Annotated[str, describe_key("what happened, in a few words")]
    match: Annotated[
        tuple[str, ...],
        describe_key(
            "regular expressions of Python; one that is found in `type: message` is enough"
        ),
    ] = ()
    kinds: Annotated[
        tuple[Literal["exception", "signal", "exit", "thread", "launcher"], ...],
        describe_key("the only kinds of ends that count; default: any"),
    ] = ()
    types: Annotated[tuple[str, ...], describe_key("names of exceptions")] = ()
    signals: Annotated[
        tuple[
            Annotated[str, pattern_mark("SIG[A-Z0-9]+", "the name of a signal, such as SIGSEGV")],
            ...,
        ],
        describe_key("names of signals"),
    ] = ()
    logs: Annotated[
        tuple[str, ...],
        describe_key(
            "regular expressions for lines of the files in `job.logs`, which hold more than errors"
        ),
    ] = ()
    codes: Annotated[tuple[int, ...], describe_key("exit codes")] = ()
    relaunch: Annotated[
        Literal["always", "once", "never"],
        describe_key("what `job.on_crash` makes of it: a start each time, one per run, or none"),
    ] = "always"
    then: Annotated[str, describe_key("what people can do about it")] = ""
    command: Annotated[
        str, describe_key("the command for that; in it RUN stands for the run directory")
    ] = ""
    secondary: Annotated[
        bool, describe_key("it follows from the end of another process, which is named first")
    ] = False

    @cached_property
    def pattern(self) -> re.Pattern[str] | None:
        """All of `match` in one."""
        return re.compile("|".join(f"(?:{text})" for text in self.match)) if self.match else None

    def matches(self, failure: Failure) -> bool:
        """Return whether a failure is of this class."""
        if failure.kind == LOG_FAILURE:
            return any(re.search(text, failure.message) for text in self.logs)
        if self.kinds and failure.kind not in self.kinds:
            return False
        if failure.type in self.types or failure.type in self.signals:
            return True
        if failure.returncode is not None and failure.returncode in self.codes:
            return True
        text = f"{failure.type}: {failure.message[:SEARCHED_CHARS]}"
        return self.pattern is not None and self.pattern.search(text) is not None


def classify_failure(failure: Failure, classes: Iterable[FailureClass]) -> Failure:
    """Return the failure with what the first class that matches says; as it is without one."""
    match = next(
        (failure_class for failure_class in classes if failure_class.matches(failure)), None
    )
    if match is None:
        return failure
    return replace(
        failure,
        cls=match.id,
        title=match.title,
        then=match.then,
        command=match.command,
        relaunch=match.relaunch,
        secondary=failure.secondary or match.secondary,
    )
