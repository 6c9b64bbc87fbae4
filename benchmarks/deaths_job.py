"""The jobs of `deaths.py` that die of themselves: of their own errors, or by their own word.

python benchmarks/deaths_job.py NAME [--resume]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from deaths_way import ASKED, DIES, NOT, TOKEN, UNSAVED, WAYS, dying, training, way

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


if __name__ == "__main__":
    __import__("deaths_system")  # the other ways
    WAYS[sys.argv[1]].run()
