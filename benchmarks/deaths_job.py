"""The jobs of `deaths.py`: ways in which training dies, and what people have to read of each.

    python benchmarks/deaths_job.py NAME [--resume]

Each trains a small model, saves a checkpoint, and dies in its way. With `--resume` it goes on from
the checkpoint to its end, so that a start after the death comes to something. What must be read
stands in the decorator of each way; `{here}` in it is the line with the comment "here".
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS, SAVES, DIES = 40, 10, 30
AGAIN, NOT, ASKED, UNSAVED = "started again", "not started", "asked for", "no checkpoint"
SECRET = "hq7-" + "Zx81" * 5  # in the environment of the job, as API_TOKEN
TOKEN = "hf_" + "aB3d" * 8  # known by its form
CHECKPOINT = "ckpt.pt"


@dataclass(frozen=True)
class Way:
    """One way to die.

    Attributes:
        does: what people read in the table. run: what dies.
        says: what the first message must say of the cause, each in these words.
        cls: the class of the failure, "" for none.
        then: what `on_crash` must make of it: `AGAIN`, `NOT`, `ASKED` (an end that was asked for is
            no crash), or `UNSAVED` (another start could help, but there is no checkpoint yet).
        silent: the process records nothing of its end, so `failures.json` does not name it.
        ranks: of torchrun; 1: without it. sent: a signal that comes from outside, 0 for none.
        under: the command is an argument of this one. memory: bytes of its cgroup, 0: of none.
        disk: bytes of a file system of its own at `disk`, 0: none.
    """

    does: str
    run: Callable[[], None]
    says: tuple[str, ...]
    cls: str
    then: str
    silent: bool = False
    ranks: int = 1
    sent: int = 0
    under: tuple[str, ...] = ()
    memory: int = 0
    disk: int = 0


WAYS: dict[str, Way] = {}


def way(
    does: str, *says: str, cls: str = "", then: str = AGAIN, **more: Any
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Enter a function into the table under its own name; see `Way`."""

    def enter(run: Callable[[], None]) -> Callable[[], None]:
        lines, first = inspect.getsourcelines(run)
        marked = [first + place for place, line in enumerate(lines) if "# here" in line]
        here = f"deaths_job.py:{marked[0]}" if marked else ""
        said = tuple(each.format(here=here) for each in says)
        WAYS[run.__name__] = Way(does, run, said, cls, then, **more)
        return run

    return enter


def training(loader: Any = None) -> Iterator[int]:
    """Train, and yield each step behind its update; one rank of several where torchrun says so."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
    trained = torch.nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if "--resume" in sys.argv:
        kept = torch.load(CHECKPOINT)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        torch.set_rng_state(kept["random"])
        first = kept["step"]
    rows = iter(loader) if loader is not None else None
    for step in range(first, STEPS):
        batch = torch.randn(8, 16) if rows is None else next(rows)
        loss = (trained(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.01)
        if step == SAVES and os.environ.get("RANK", "0") == "0":
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"random": torch.get_rng_state(), "step": step + 1}
            torch.save(state, CHECKPOINT)
        yield step


def dying() -> Iterator[None]:
    """Train, and yield where it is time to die: once, never after a resume."""
    for step in training():
        if step == DIES and "--resume" not in sys.argv:
            yield


def join() -> int:
    """Enter the group of torchrun's ranks; return ours."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.get_rank()


# ── errors of the job ─────────────────────────────────────────────────────────────────────────────


@way("exception in the loop", "RuntimeError", "the loss is 17", "{here}")
def exception() -> None:
    for _ in dying():
        raise RuntimeError("the loss is 17")  # here


@way(
    "shapes that do not fit", "RuntimeError", "(8x9 and 16x4)", "{here}", cls="user-error", then=NOT
)
def shapes() -> None:
    for _ in dying():
        import torch

        torch.nn.Linear(16, 4)(torch.randn(8, 9))  # here


@way("assertion", "AssertionError", "batch 30 is empty", "{here}", cls="assertion")
def assertion() -> None:
    for _ in dying():
        assert not DIES, f"batch {DIES} is empty"  # here


@way(
    "recursion without an end",
    "RecursionError",
    "maximum recursion depth",
    "{here}",
    cls="data-error",
)
def recursion() -> None:
    def depth(tree: list[Any]) -> int:
        return 1 + depth(tree)  # here

    for _ in dying():
        depth([])


class VendorError(Exception):
    """An exception of the job's own."""


@way(
    "exception of its own, with secrets in its text",
    "VendorError",
    "the vendor refused token <redacted>",
    "{here}",
)
def secrets() -> None:
    for _ in dying():
        login = f"{os.environ['API_TOKEN']} of {TOKEN}"
        raise VendorError(f"the vendor refused token {login}")  # here


@way(
    "exception in a DataLoader worker",
    "ValueError",
    "row 7 has no text",
    "{here}",
    "DataLoader worker process 0",
    cls="data-error",
    then=UNSAVED,
)
def loader() -> None:
    import torch

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> Any:
            if index == 7:
                raise ValueError(f"row {index} has no text")  # here
            return torch.zeros(16)

    for _ in training(torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=1)):
        pass


@way(
    "DataLoader worker killed by a signal",
    "DataLoader worker",
    "killed by signal: Killed",
    cls="loader-worker",
    then=UNSAVED,
)
def loader_killed() -> None:
    import torch

    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> Any:
            if index == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.zeros(16)

    for _ in training(torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=1)):
        pass


@way("exception in a process of a pool", "KeyError", "record 7", "{here}", cls="data-error")
def pool() -> None:
    import multiprocessing

    for _ in dying():
        with multiprocessing.get_context("fork").Pool(1) as workers:
            workers.map(read_record, [7])


def read_record(number: int) -> None:
    raise KeyError(f"record {number}")


@way(
    "exception in a thread that ends the job",
    "OSError",
    "the upload broke off",
    "{here}",
    "thread uploader",
)
def thread() -> None:
    import threading

    def upload() -> None:
        raise OSError("the upload broke off")  # here

    own = threading.excepthook

    def ends_the_job(args: Any) -> None:
        own(args)
        os._exit(1)

    for _ in dying():
        threading.excepthook = ends_the_job
        started = threading.Thread(target=upload, name="uploader")
        started.start()
        started.join()


# ── before the first step ─────────────────────────────────────────────────────────────────────────


@way(
    "exception in an imported module",
    "ValueError",
    "'eight'",
    "settings.py:2",
    cls="data-error",
    then=UNSAVED,
)
def imported() -> None:
    Path("settings.py").write_text("name = 'eight'\nrows = int(name)\n")
    sys.path.insert(0, str(Path.cwd()))
    __import__("settings")


@way(
    "package that is not installed",
    "ModuleNotFoundError",
    "no_such_kernels",
    "{here}",
    cls="import",
    then=NOT,
)
def package() -> None:
    import no_such_kernels  # here # noqa: F401


@way("syntax error in the script", "SyntaxError", "train.py:2", cls="syntax", then=NOT)
def syntax() -> None:
    Path("train.py").write_text("rows = 8\nfor row in range(rows)\n    print(row)\n")
    os.execv(sys.executable, [sys.executable, "train.py"])  # noqa: S606


@way("argument that the job does not know", "argparse", "{here}", cls="arguments", then=NOT)
def argument() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int)
    parser.parse_args(["--rows", "eight"])  # here


@way(
    "file that is not there",
    "FileNotFoundError",
    "shards/0007.bin",
    "{here}",
    cls="missing-file",
    then=UNSAVED,
)
def missing() -> None:
    Path("shards/0007.bin").read_bytes()  # here


# ── ends by its own word ──────────────────────────────────────────────────────────────────────────


@way("sys.exit(3)", "sys.exit(3)", "{here}")
def exits() -> None:
    for _ in dying():
        sys.exit(3)  # here


@way("os._exit(3)", "code 3", silent=True)
def leaves() -> None:
    for _ in dying():
        os._exit(3)


@way("KeyboardInterrupt of its own", "KeyboardInterrupt", then=ASKED)
def interrupt() -> None:
    for _ in dying():
        raise KeyboardInterrupt  # here


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
    "another process killed it",
    cls="killed",
    sent=signal.SIGKILL,
)
def killed() -> None:
    wait()


@way(
    "SIGKILL from outside, below a shell script",
    "SIGKILL",
    "another process killed it",
    cls="killed",
    sent=signal.SIGKILL,
    under=("sh", "-c", '"$@"; exit $?', "sh"),
)
def killed_below() -> None:
    wait()


@way("SIGTERM from outside", "SIGTERM", then=ASKED, sent=signal.SIGTERM)
def terminated() -> None:
    wait()


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
    "another process killed it",
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


if __name__ == "__main__":
    WAYS[sys.argv[1]].run()
