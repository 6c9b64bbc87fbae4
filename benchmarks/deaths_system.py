"""The jobs of `deaths.py` that the system ends: signals, no memory or space, ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from deaths_way import ASKED, NOT, dying, join, way

# ── signals ───────────────────────────────────────────────────────────────────────────────────────


@way("segmentation fault", "SIGSEGV", "{here}", "native code crashed", cls="crash")
def segfault() -> None:
    import ctypes

    for _ in dying():
        ctypes.string_at(0)  # here


@way("abort", "SIGABRT", "{here}", "native code crashed", cls="crash")
def abort() -> None:
    for _ in dying():
        os.abort()  # here


@way("bus error", "SIGBUS", "{here}", "native code crashed", cls="crash")
def bus() -> None:
    import mmap

    for _ in dying():
        with Path("mapped").open("wb+") as file:
            file.truncate(4096)
            mapped = mmap.mmap(file.fileno(), 4096)
            file.truncate(0)
            mapped[0]  # here


@way("illegal instruction", "SIGILL", "{here}", "native code crashed", cls="crash")
def illegal() -> None:
    import ctypes
    import mmap

    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\x0f\x0b" if os.uname().machine == "x86_64" else b"\x00\x00\x00\x00")
    call = ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    for _ in dying():
        call()  # here


def wait() -> None:
    """Say that the signal may come, and wait for it."""
    for _ in dying():
        Path("up").write_text(str(os.getpid()))
        time.sleep(60)


@way(
    "SIGKILL from outside",
    "SIGKILL",
    "killed, by what is unknown",
    cls="killed",
    sent=signal.SIGKILL,
)
def killed() -> None:
    wait()


@way(
    "SIGKILL from outside, below a shell script",
    "SIGKILL",
    "killed, by what is unknown",
    cls="killed",
    sent=signal.SIGKILL,
    under=("sh", "-c", '"$@"; exit $?', "sh"),
)
def killed_below() -> None:
    wait()


@way("SIGTERM from outside", "SIGTERM", then=ASKED, sent=signal.SIGTERM)
def terminated() -> None:
    wait()


@way(
    "SIGTERM of torchrun from outside",
    "SignalException",
    "signal: 15",
    then=ASKED,
    sent=signal.SIGTERM,
    ranks=2,
)
def launcher_terminated() -> None:
    own = join()
    for _ in dying():
        if own == 0:
            Path("up").write_text(str(os.getppid()))
        time.sleep(60)


# ── memory, files and disks ───────────────────────────────────────────────────────────────────────


@way(
    "killed by the kernel for lack of memory, in a cgroup",
    "SIGKILL",
    "out of memory",
    "this cgroup",
    cls="host-oom",
    memory=900 << 20,
)
def host_memory() -> None:
    held = []
    for _ in dying():
        while True:
            held.append(bytearray(8 << 20))


@way(
    "allocation that the host refuses",
    "allocate",
    "DefaultCPUAllocator",
    "{here}",
    "out of host memory",
    cls="host-oom",
)
def allocation() -> None:
    for _ in dying():
        import torch

        torch.empty(1 << 50)  # here


@way(
    "torch.OutOfMemoryError, raised by hand",
    "OutOfMemoryError",
    "Tried to allocate 2.00 GiB",
    "{here}",
    "a GPU ran out of memory",
    cls="cuda-oom",
)
def device_memory() -> None:
    for _ in dying():
        import torch

        text = (
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"
        )
        raise torch.OutOfMemoryError(text)  # here


@way(  # torch does not say why
    "checkpoint on a full disk, by torch.save",
    "No space left on device",
    "{here}",
    "a disk is full",
    cls="disk-full",
    then=NOT,
    disk=1 << 20,
)
def full_disk() -> None:
    for _ in dying():
        import torch

        torch.save(torch.zeros(1 << 20), "disk/ckpt.pt")  # here


@way(
    "checkpoint on a full disk, by torch.save into an open file",
    "No space left on device",
    "{here}",
    "a disk is full",
    cls="disk-full",
    then=NOT,
    disk=1 << 20,
)
def full_file() -> None:
    file = Path("disk/ckpt.pt").open("wb", buffering=0)  # noqa: SIM115
    for _ in dying():
        import torch

        torch.save(torch.zeros(1 << 20), file)  # here


@way(
    "log on a full disk",
    "OSError",
    "No space left on device",
    "{here}",
    "a disk is full",
    cls="disk-full",
    then=NOT,
)
def full_log() -> None:
    log = Path("/dev/full").open("w")  # noqa: SIM115
    for _ in dying():
        print("step", file=log, flush=True)  # here


@way(
    "limit of a file's size",
    "OSError",
    "File too large",
    "{here}",
    "a limit of the process was reached",
    cls="resource-limit",
)
def file_size() -> None:
    import resource

    for _ in dying():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        Path("predictions").write_bytes(bytes(2 << 20))  # here


@way(
    "out of file descriptors",
    "OSError",
    "Too many open files",
    "{here}",
    "a limit of the process was reached",
    cls="resource-limit",
)
def descriptors() -> None:
    import resource

    for _ in dying():
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        while True:
            OPEN.append(Path("/dev/null").open())  # here # noqa: SIM115


OPEN: list[Any] = []


@way(
    "file system whose server is gone",
    "OSError",
    "Stale file handle",
    "{here}",
    "the file system failed",
    cls="file-system",
)
def stale() -> None:
    import errno

    for _ in dying():
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))  # here


@way(
    "fault of a GPU, raised by hand",
    "RuntimeError",
    "uncorrectable ECC error",
    "{here}",
    "a GPU or its link reported a fault",
    cls="gpu-hardware",
)
def hardware() -> None:
    for _ in dying():
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")  # here


# ── ranks ─────────────────────────────────────────────────────────────────────────────────────────


@way(
    "exception in one rank of two",
    "ValueError",
    "shard 3 is damaged",
    "{here}",
    "rank 1",
    cls="data-error",
    ranks=2,
)
def rank() -> None:
    own = join()
    for _ in dying():
        if own == 1:
            raise ValueError("shard 3 is damaged")  # here


@way(
    "SIGKILL of one rank of two",
    "SIGKILL",
    "rank 1",
    "killed, by what is unknown",
    cls="killed",
    ranks=2,
)
def rank_killed() -> None:
    own = join()
    for _ in dying():
        if own == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@way(
    "segmentation fault in one rank of two",
    "SIGSEGV",
    "{here}",
    "rank 1",
    "native code crashed",
    cls="crash",
    ranks=2,
)
def rank_segfault() -> None:
    import ctypes

    own = join()
    for _ in dying():
        if own == 1:
            ctypes.string_at(0)  # here


@way(
    "timeout of a collective",
    "Timed out waiting",
    "{here}",
    "rank 0",
    "a collective timed out",
    cls="nccl-timeout",
    ranks=2,
)
def collective() -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    own = join()
    hasty = dist.new_group(timeout=timedelta(seconds=2))
    for _ in dying():
        if own == 1:
            time.sleep(30)
        dist.all_reduce(torch.zeros(1), group=hasty)  # here
