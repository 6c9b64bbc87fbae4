"""How a process ended that was collected by somebody else: newer kernels keep it for those who ask.

A pidfd that was opened while the process lived knows its wait status once it is collected, from
Linux 6.15 on. Source: `PIDFD_GET_INFO` with `PIDFD_INFO_EXIT` in `linux/pidfd.h`; `struct
pidfd_info` of 64 bytes, the first version: u64 mask, ..., s32 exit_code.
"""

from __future__ import annotations

import fcntl
import os
import struct

_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11  # _IOWR(0xFF, 11, struct pidfd_info)
_EXIT = 1 << 3
_MASK, _CODE = struct.Struct("=Q"), struct.Struct("=60xi")


class PidfdExitStatus:
    """A hold on a living process that can be asked how it ended, even by a stranger."""

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
        _MASK.pack_into(info, 0, _EXIT)
        try:
            fcntl.ioctl(self._fd, _GET_INFO, info)
        except OSError:  # older kernels do not know the question, or no longer the process
            return None
        if not _MASK.unpack_from(info)[0] & _EXIT:
            return None
        return os.waitstatus_to_exitcode(_CODE.unpack(info)[0])

    def close(self) -> None:
        """Let go of the process."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
