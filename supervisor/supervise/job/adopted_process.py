"""The job as a process that is not our child: its supervisor died, and we took its place.

What a child cannot hide from its parent has to be asked for here. Whether it lives: by pid and
start time, in `/proc`. Which processes belong to it: all that carry the run's mark in their
environment, with their descendants, since orphans went to whoever adopts them on this machine. How
it ended: from the kernel while it is a zombie or where it remembers, else from what the job itself
recorded.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable

import psutil

from ..errors import StoreError
from .environment import LAUNCH, marked
from .proc_stat import EXIT, STARTED, STATE, start_ticks, stat_fields
from .process import UNKNOWN, Process
from .process_tree import Tree, alive, group_of

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
        super().__init__(pid, group_of(pid) or pid)
        # Held is the job, and not another process that has got its pid since.
        self._held = start_ticks(pid) == ticks
        if self._held and marked(pid, run_id) is False:
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
                    known = self._exit_status.returncode() if self._held else None
                    self._end(known if known is not None else self._recorded(self.pid, self._ticks))
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
        found: dict[psutil.Process, None] = {}
        for root in self._children():
            found[root] = None
            try:
                found.update(dict.fromkeys(root.children(recursive=True)))
            except psutil.NoSuchProcess:
                continue
        return [process for process in found if process.pid != os.getpid() and alive(process)]

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
