"""The process of the job: its launch, its end, and a process that another supervisor started.

The argument list, the working directory and every inherited descriptor are passed on as they are:
no pipe lies between the job and its terminal or log file, so the supervisor can neither block it
nor break it when it dies (unless the output is kept, see `logs`). The job gets no PDEATHSIG, since
training continues without a supervisor, and default signal handling but for signals that were
ignored already. It gets a process group of its own of which it is not the leader (`_new_group`):
`setsid()` fails in a leader. The supervisor becomes a subreaper: a process of the job that loses
its parent becomes its child, so that a stop can reach it and its end is collected.

The main thread calls `poll`, which also does job control and collects orphans. Any other thread may
`wait`, `signal` and `stop` (an interrupt, then TERM, then KILL). The exit status is read before it
is collected, so that no signal can hit a pid that was given away.

A process that another supervisor started is no child. Whether it lives is known by pid and start
time in /proc; which processes belong to it, by the run's mark in their environment and by descent;
how it ended, from the kernel while it is a zombie or where it remembers, else from the job's own
record.
"""

from __future__ import annotations

import ctypes
import difflib
import errno
import fcntl
import os
import shutil
import signal
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

import psutil
from msgspec import Struct
from msgspec.structs import replace

from ..core.model.payload import Payload
from ..errors import ActionError, LaunchError, StoreError
from .environment import LAUNCH, has_run_mark
from .fencing import PendingCommand
from .process_tree import (
    EXIT,
    STARTED,
    STATE,
    Terminal,
    Tree,
    is_alive,
    process_group,
    start_ticks,
    stat_fields,
    suspend_process_group,
)
from .segment_reader import RankView

if TYPE_CHECKING:
    from .process_tree import Tree

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
NO_OUTPUTS: Mapping[int, int] = {}
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # the shell's rule


def become_subreaper() -> bool:
    """Adopt orphans among our descendants; False where the kernel cannot."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def spawn_job(
    argv: Sequence[str], environ: Mapping[str, str], outputs: Mapping[int, int] = NO_OUTPUTS
) -> tuple[int, int]:
    """Start `argv` in a process group of its own; return its pid and the id of the group.

    Args:
        outputs: its descriptors that are not inherited -> ours that it gets for them.

    Raises:
        LaunchError: it was not found (exit code 127) or is not executable (126).
    """
    become_subreaper()
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        # Inherited from a careless parent; with it the kernel throws exit codes away.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with _new_group() as group:
        try:
            pid = os.posix_spawnp(
                argv[0],
                list(argv),
                dict(environ),
                file_actions=[(os.POSIX_SPAWN_DUP2, ours, fd) for fd, ours in outputs.items()],
                setpgroup=group,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores these two for itself
            )
        except (OSError, ValueError) as error:
            raise explain_start_error(argv, environ, error) from error
    return pid, group or pid


def replace_process(argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Become the program. Raises LaunchError: it cannot be started."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these two for itself
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], list(argv), dict(environ))  # noqa: S606 - the user's own command
    except (OSError, ValueError) as error:
        raise explain_start_error(argv, environ, error) from error


@contextmanager
def _new_group() -> Iterator[int]:
    """Make a process group and keep it until its first member is in; 0: that member makes one.

    The leader is a process that has nothing to do: what exists when `posix_spawn` returns is the
    group, and it exists until the leader is collected, even if that has ended before. So nothing
    has to be waited for, and it does not matter how far the program gets before it is killed. It
    is our own interpreter, the one program that is surely there (`/proc/self/exe` also names one
    that was deleted since). `os.fork` would need no program, but a relaunch happens while other
    threads run, and a fork of such a process can deadlock.
    """
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    try:
        leader = os.posix_spawn(
            "/proc/self/exe", ["supervise-group", "-V"], {}, file_actions=null, setpgroup=0
        )
    except OSError:  # no /proc, or no process to spare: the job then leads its group itself
        yield 0
        return
    try:
        yield leader
    finally:
        with suppress(OSError):
            os.kill(leader, signal.SIGKILL)
            os.waitpid(leader, 0)


def explain_start_error(
    argv: Sequence[str], environ: Mapping[str, str], error: OSError | ValueError
) -> LaunchError:
    """Turn the operating system's refusal into one sentence and a hint."""
    command = argv[0] if argv else ""
    search = environ.get("PATH", os.defpath)
    command_path = command if "/" in command else shutil.which(command, mode=os.F_OK, path=search)
    path = Path(command_path or "/nowhere")
    if isinstance(error, ValueError):
        return LaunchError(f"cannot start {command!r}: {error}", exit_code=NOT_EXECUTABLE)
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return _not_found(command, path, search)
    hint = None
    reason = error.strerror or str(error)
    if os.path.isdir(path):  # noqa: PTH112 - Path raises where a directory above is closed
        reason = "it is a directory"
    elif error.errno == errno.ENOEXEC:
        reason, hint = "it is not a program", "give its interpreter first, or add a '#!' line"
    elif error.errno == errno.EACCES and not os.access(path, os.X_OK):
        reason = "it is not executable"
        hint = _run_with_python(command) or f"chmod +x {command}"
        if not os.path.exists(path):  # noqa: PTH110
            reason, hint = "a directory above it may not be entered", f"namei -l {command}"
    return LaunchError(f"cannot start {command}: {reason}", exit_code=NOT_EXECUTABLE, hint=hint)


def _not_found(command: str, path: Path, search: str) -> LaunchError:
    if os.path.isfile(path):  # noqa: PTH113 - the file is there, so it is the interpreter in its first line that is not
        with path.open("rb") as file:
            line = file.readline(256).decode("utf-8", "replace")
        interpreter = line[2:].strip() if line.startswith("#!") else "its loader"
        return LaunchError(
            f"cannot start {command}: its interpreter {interpreter} does not exist",
            exit_code=NOT_EXECUTABLE,
        )
    hint = _run_with_python(command) if os.path.isfile(command) else None  # noqa: PTH113
    if hint is None and "/" not in command:
        near = difflib.get_close_matches(command, _programs(search), n=1, cutoff=0.75)
        hint = f"did you mean {near[0]}?" if near else None
    return LaunchError(
        f"cannot start {command!r}: command not found", exit_code=NOT_FOUND, hint=hint
    )


def _run_with_python(command: str) -> str | None:
    if not command.endswith(".py"):
        return None
    return f"did you mean: supervise -- python {command}"


def _programs(search: str) -> list[str]:
    names: set[str] = set()
    for directory in search.split(os.pathsep):
        try:
            with os.scandir(directory or ".") as entries:
                names.update(entry.name for entry in entries if entry.stat().st_mode & stat.S_IXUSR)
        except OSError:
            continue
    return sorted(names)


UNKNOWN = 255  # stands for an exit code that nobody has
_INTERRUPTED = 128 + signal.SIGINT  # what a shell calls the end by SIGINT
_PAUSE_S = 0.01  # between two looks while waiting
_STOPS = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)  # what a terminal stops a job with


def exit_code(returncode: int) -> int:
    """Return the exit code that passes the job's end on: its own, or 128+n after signal n."""
    return returncode if returncode >= 0 else 128 - returncode


class Process:
    """The job's first process, and through `tree` all the others.

    Attributes:
        pid: of the first process.
        group: the process group it was started in. Another process made it, so it lives only as
            long as it has members: its id is signalled while one is known to be in it.
        returncode: None while it runs, then as in `subprocess` (negative after a signal).
        unknown: it has ended, and nobody can tell how: its returncode is `UNKNOWN`.
        interrupted: it had the terminal's foreground and died of SIGINT: somebody typed Ctrl-C.
        outlived: it has ended, and others of the tree go on: signals are meant for them.
        stopped: True while the first process is stopped by a signal.
        suspended_ns: how long we ourselves were stopped together with the job (Ctrl-Z), in sum.
            Silence of the probe during that time means nothing.
    """

    def __init__(
        self,
        pid: int,
        group: int,
        terminal: Terminal | None = None,
        earlier_children: Set[tuple[int, int | None]] = frozenset(),
    ) -> None:
        """Watch a process that runs.

        Args:
            earlier_children: pid and start of those that were there before it: not the job's.
        """
        self.pid = pid
        self.group = group
        self._before = earlier_children
        self.returncode: int | None = None
        self.unknown = False
        self.interrupted = False
        self.outlived = False
        self.stopped = False
        self.suspended_ns = 0
        self._terminal = terminal
        self._continues = 0
        self._lock = threading.RLock()

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        environ: Mapping[str, str],
        *,
        terminal: Terminal | None = None,
        outputs: Mapping[int, int] = NO_OUTPUTS,
    ) -> Process:
        """Start the command; with a `terminal` it gets the foreground, if that is ours to give.

        `outputs` as in `spawn_job`.

        Raises:
            LaunchError: it was not found or is not executable.
        """
        earlier_children = frozenset((child, start_ticks(child)) for child in _children())
        pid, group = spawn_job(argv, environ, outputs)
        if terminal is not None:
            terminal.lend(group)
        return cls(pid, group, terminal, earlier_children)

    @cached_property
    def tree(self) -> Tree:
        """Every process of the job."""
        from .process_tree import Tree

        return Tree(self.pid, self._before)

    @property
    def has_terminal(self) -> bool:
        """Whether the job may have the foreground of a terminal."""
        return self._terminal is not None

    def poll(self) -> int | None:
        """Return the returncode, None while it runs. Main thread only; serves job control too."""
        if self._collect_exit() is None:
            self._job_control()
        self.tree.reap()
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end, at most `timeout_s`; return the returncode or None. Any thread."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._collect_exit() is None and (deadline is None or time.monotonic() < deadline):
            time.sleep(_PAUSE_S)
        return self.returncode

    def signal(self, signum: int, *, group: bool = False) -> bool:
        """Send `signum` to the first process, or to its whole `group`; False when it has ended.

        Those that go on without it get what is not of job control: we would not stop with them.
        """
        with self._lock:  # nobody collects it in between
            if self.returncode is not None:
                return self.outlived and not group and self.tree.signal(signum) > 0
            try:
                if group:
                    self._signal_group(signum)
                else:
                    os.kill(self.pid, signum)
            except ProcessLookupError:
                return False
            return True

    def now(self) -> tuple[int, int]:
        """Return the time, and `suspended_ns` at that time: no Ctrl-Z comes in between."""
        with self._lock:
            return time.monotonic_ns(), self.suspended_ns

    def _signal_group(self, signum: int) -> None:
        """Signal the group that the first process is in, and those it left behind in its first."""
        now = os.getpgid(self.pid)
        if now in (self.group, self.pid):
            os.killpg(now, signum)
        else:  # it joined a group of others
            os.kill(self.pid, signum)
        if now != self.group:
            self.tree.signal(signum, group=self.group)

    def _foreground_group(self) -> int:
        """Return the group that belongs in the foreground: its own, if it made itself one."""
        try:
            return self.pid if os.getpgid(self.pid) == self.pid else self.group
        except ProcessLookupError:
            return self.group

    def stop(self, *, term_s: float, kill_s: float = 10.0) -> JobEnd:
        """End every process of the job: TERM, after `term_s` KILL. Any thread but the main one.

        Args:
            kill_s: until a process that outlives KILL counts as stuck in the kernel.
        """
        outcome = "ended"
        members = self.tree.members()
        if members:
            outcome = "term"
            members = self.tree.end(signal.SIGTERM, term_s)
        if members:
            outcome = "kill"
            members = self.tree.end(signal.SIGKILL, kill_s)
        self.wait(0.0 if members else 1.0)
        survivors = [process.pid for process in members]
        return JobEnd(outcome, self.returncode, survivors)

    def return_terminal(self) -> None:
        """Take the foreground from it: what is typed now, Ctrl-C above all, comes to us."""
        if self._terminal is not None:
            self._terminal.take_back(self._foreground_group())

    def on_continued(self) -> None:
        """We were continued (`fg` or `bg`): hand the terminal on and continue the job."""
        self._continues += 1
        if self._terminal is not None and self.returncode is None:
            self._terminal.lend(self._foreground_group())
        self.signal(signal.SIGCONT, group=True)

    def _collect_exit(self) -> int | None:
        """Notice the end of the first process and collect it."""
        with self._lock:
            if self.returncode is not None:
                return self.returncode
            try:
                info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self.returncode, self.unknown = UNKNOWN, True  # somebody else collected it
                return self.returncode
            if info is None:
                return None
            group = self._foreground_group()  # as long as it is not collected
            exited = info.si_code == os.CLD_EXITED
            self.returncode = info.si_status if exited else -info.si_status
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG)
            if self._terminal is not None:
                front = self._terminal.foreground() == group
                self.interrupted = front and exit_code(self.returncode) == _INTERRUPTED
                self._terminal.take_back(group)
            return self.returncode

    def _job_control(self) -> None:
        if self._terminal is not None and (front := self._foreground_group()) != self.group:
            self._terminal.follow(self.group, front)
        try:
            info = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
        except ChildProcessError:  # it was collected by a waiting thread a moment ago
            return
        if info is None:
            return
        self.stopped = info.si_code == os.CLD_STOPPED
        if self.stopped and self._terminal is not None and info.si_status in _STOPS:
            self._stop_together(self._terminal, info.si_status)

    def _stop_together(self, terminal: Terminal, signum: int) -> None:
        asked_for_it = signum in (signal.SIGTTIN, signal.SIGTTOU)
        if not (
            asked_for_it and terminal.lend(self._foreground_group())
        ):  # else it was only too quick for us
            terminal.take_back(self._foreground_group())
            with self._lock:
                since, continues = time.monotonic_ns(), self._continues
                suspend_process_group(signum)
                self.suspended_ns += time.monotonic_ns() - since
            if self._continues != continues:
                return  # the handler of SIGCONT did it; once more could undo the next Ctrl-Z
        self.on_continued()


def _children() -> Iterable[int]:
    """Return the children of this process."""
    try:
        tasks = [path.read_bytes() for path in Path("/proc/self/task").glob("*/children")]
    except OSError:  # a thread has just ended
        tasks = []
    if tasks:
        return [int(pid) for task in tasks for pid in task.split()]
    import psutil  # this kernel does not list them

    return [child.pid for child in psutil.Process().children()]


Recorded = Callable[[int, int], int | None]

# `PIDFD_GET_INFO` with `PIDFD_INFO_EXIT` of `linux/pidfd.h`; `struct pidfd_info` of 64 bytes, the
# first version: u64 mask, ..., s32 exit_code.
_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11  # _IOWR(0xFF, 11, struct pidfd_info)
_INFO_EXIT = 1 << 3
_MASK, _CODE = struct.Struct("=Q"), struct.Struct("=60xi")


class AdoptedProcess(Process):
    """The job's first process, which somebody else started; as `Process` in all other ways."""

    def __init__(self, pid: int, ticks: int, run_id: str, recorded: Recorded) -> None:
        """Watch process `pid`, if it is still the one that was started at `ticks` after boot.

        Args:
            recorded: `(pid, ticks)` -> the returncode that the job itself recorded, or None.

        Raises:
            StoreError: it runs, and does not carry the mark of the run.
        """
        self._ticks = ticks
        self._recorded = recorded
        self._exit_status = PidfdExitStatus(pid)
        self.tree = AdoptedTree(pid, ticks, run_id)
        super().__init__(pid, process_group(pid) or pid)
        # Held is the job, and not another process that has got its pid since.
        self._held = start_ticks(pid) == ticks
        if self._held and has_run_mark(pid, run_id) is False:
            self._exit_status.close()
            raise StoreError(
                f"process {pid} runs, and does not carry the mark of run {run_id} in its "
                "environment: nothing is done to it",
                hint=f"see what it is: ps -fp {pid}; if it is the job, end it and start it again",
            )
        self._collect_exit()

    def _collect_exit(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                stat = stat_fields(self.pid)
                if stat is None or int(stat[STARTED]) != self._ticks:
                    returncode = self._exit_status.returncode() if self._held else None
                    self._end(
                        returncode
                        if returncode is not None
                        else self._recorded(self.pid, self._ticks)
                    )
                elif stat[STATE] in (b"Z", b"X"):
                    self._end(os.waitstatus_to_exitcode(int(stat[EXIT])))
            return self.returncode

    def _end(self, returncode: int | None) -> None:
        self._exit_status.close()
        self.unknown = returncode is None
        self.returncode = UNKNOWN if returncode is None else returncode

    def signal(self, signum: int, *, group: bool = False) -> bool:
        """Send `signum` as `Process` does, after a look whether the pid is still the job's."""
        self._collect_exit()
        return super().signal(signum, group=group)

    def _job_control(self) -> None:
        """It has another terminal, or none."""


class AdoptedTree(Tree):
    """Every process of a job that is not our child."""

    def __init__(self, leader: int, ticks: int, run_id: str) -> None:
        super().__init__(leader)
        self._ticks = ticks
        self._mark = f"{run_id}:"

    def members(self) -> list[psutil.Process]:
        """Return the living processes of the job, parents before their children."""
        members: dict[psutil.Process, None] = {}
        for root in self._children():
            members[root] = None
            try:
                members.update(dict.fromkeys(root.children(recursive=True)))
            except psutil.NoSuchProcess:
                continue
        return [process for process in members if process.pid != os.getpid() and is_alive(process)]

    def reap(self, every_s: float = 1.0) -> int:
        """Collect nothing: they are not our children."""
        return 0

    def _children(self) -> list[psutil.Process]:
        """The first process, and all that carry the mark, oldest first."""
        psutil.process_iter.cache_clear()  # it would yield the former owner of a pid used again
        marked = [process for process in psutil.process_iter() if self._belongs(process)]
        return sorted(marked, key=lambda process: process.create_time())

    def _belongs(self, process: psutil.Process) -> bool:
        if process.pid == self._leader:
            return start_ticks(process.pid) == self._ticks
        try:
            return process.environ().get(LAUNCH, "").startswith(self._mark)
        except (psutil.Error, OSError):  # gone, or another user's
            return False


class PidfdExitStatus:
    """How a process ended that somebody else collected.

    A pidfd that was opened while the process lived knows that, from Linux 6.15 on.
    """

    def __init__(self, pid: int) -> None:
        self._fd: int | None = None
        try:
            self._fd = os.pidfd_open(pid)
        except OSError:  # it is gone, or pidfds are forbidden here
            pass

    def returncode(self) -> int | None:
        """Return the code as `subprocess` gives it; None: not collected yet, or an older kernel."""
        if self._fd is None:
            return None
        info = bytearray(_CODE.size)
        _MASK.pack_into(info, 0, _INFO_EXIT)
        try:
            fcntl.ioctl(self._fd, _GET_INFO, info)
        except OSError:  # older kernels do not know the question, or no longer the process
            return None
        if not _MASK.unpack_from(info)[0] & _INFO_EXIT:
            return None
        return os.waitstatus_to_exitcode(_CODE.unpack(info)[0])

    def close(self) -> None:
        """Let go of the process."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


T = TypeVar("T")
LOOP_S = 2.0  # the main loop comes round every few milliseconds; longer than this it is stuck


class JobEnd(Struct, frozen=True):
    """End of all processes of a job.

    Attributes:
        how: `interrupt`, `term`, `kill`, or `ended` if it ended by itself meanwhile.
        survivors: pids that outlived KILL. interrupt: what came of asking the ranks to end.
        seconds: that it took.
    """

    how: str
    returncode: int | None
    survivors: Sequence[int]
    interrupt: str = ""
    seconds: float = 0.0


class Ranks(Protocol):
    """What this needs of the job."""

    process: Process
    standstill: bool

    def ranks(self) -> Mapping[int, RankView]: ...
    def on_loop(self, call: Callable[[], T], timeout_s: float) -> T: ...
    def release_signals(self) -> None: ...
    def stop_waiting(self, pending: PendingCommand) -> None: ...
    def send_command(
        self, verb: str, args: Payload, *, key: str, partly: bool = False
    ) -> PendingCommand: ...


def halt_job(job: Ranks, *, grace_s: float, term_s: float) -> JobEnd:
    """Ask at a step boundary, after `grace_s` TERM, after `term_s` KILL, over the whole tree."""
    since = time.monotonic()
    asked_for = _interrupt(job, grace_s)
    ended = job.process.returncode is not None
    job.release_signals()
    end = job.process.stop(term_s=term_s)
    if ended:
        end = replace(end, how="interrupt" if asked_for == "interrupted" else "ended")
    return replace(end, interrupt=asked_for, seconds=round(time.monotonic() - since, 3))


def _interrupt(job: Ranks, grace_s: float) -> str:
    """Ask the ranks to stop at their next step boundary; say what came of it."""
    if job.process.returncode is not None:
        return "skipped: the job has ended"
    if grace_s <= 0:
        return "skipped: no grace"
    if job.standstill:  # one that comes to a step boundary does not stand still
        return "skipped: the job stands still"
    deadline = time.monotonic() + grace_s
    try:
        silent_ns = job.on_loop(lambda: silence_ns(job), min(grace_s, LOOP_S))
    except ActionError as error:
        return f"skipped: {error}"
    if silent_ns is None:
        return "skipped: no probe is attached to the job"
    if silent_ns > grace_s * 1e9:
        return f"skipped: the job was silent for {silent_ns / 1e9:.0f} s"
    key = f"stop-{time.monotonic_ns()}"
    pending = job.send_command("stop", Payload({"how": "interrupt"}), key=key, partly=True)
    try:
        answers = pending.wait(max(0.0, deadline - time.monotonic()))
    finally:
        job.stop_waiting(pending)
    if not any(ack.ok for ack in answers.values()):
        errors = [ack.error for ack in answers.values() if ack.error]
        return f"not done: {errors[0] if errors else pending.refusal or 'no rank answered'}"
    job.process.wait(max(0.0, deadline - time.monotonic()))
    return "interrupted"


def silence_ns(job: Ranks) -> int | None:
    """On the main loop: how long the rank that was heard last has been silent."""
    heard_ns = [view.seen_ns for view in job.ranks().values()]
    return time.monotonic_ns() - max(heard_ns) if heard_ns else None
