"""The job's own part of a snapshot: stacks, random states, the last batches.

Writes plain files into the directory it is given; the supervisor adds the rest of the bundle.
"""

from __future__ import annotations

import base64
import faulthandler
import json
import os
import random
import signal
import sys
import threading
from functools import partial
from typing import Any, Mapping

from . import files

STACKS, MAIN_STACK = signal.SIGRTMIN + 5, signal.SIGRTMIN + 6  # no launcher or scheduler's


def write_evidence(
    directory: str, rank: int, torch: Any, batches: list[Mapping[str, Any]]
) -> list[str]:
    """Write the three files of one rank and return their paths.

    Raises:
        OSError: the directory cannot be written.
    """
    files.make_directory(directory)
    paths = []
    stacks = os.path.join(directory, f"rank-{rank}-stacks.txt")
    with files.replacing_file(stacks) as file:
        faulthandler.dump_traceback(file, all_threads=True)
    paths.append(stacks)
    for name, content in (("rng", read_random_states(torch)), ("batches", batches)):
        path = os.path.join(directory, f"rank-{rank}-{name}.json")
        files.replace_file(path, json.dumps(content, default=_plain).encode("utf-8", "replace"))
        paths.append(path)
    return paths


def read_random_states(torch: Any) -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators, read without drawing."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy: Any = sys.modules.get("numpy")
    if hasattr(numpy, "random"):
        states["numpy"] = numpy.random.get_state(legacy=False)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _plain(value: Any) -> Any:
    """JSON for arrays and tensors: their bytes in base64."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    if hasattr(value, "tobytes"):
        return base64.b64encode(value.tobytes()).decode("ascii")
    return str(value)


def dump_stacks_on_signals(marks: str) -> None:
    """Let two signals dump stacks into `<marks>/stacks.<pid>.txt`: for a job that hangs.

    It reads no mailbox any more. `STACKS` is answered for all threads by the interpreter, as soon
    as the main thread runs Python. `MAIN_STACK` is answered for the thread that gets it, from
    within the signal handler. That may only be asked of a thread which stands still: frames are
    torn while a function is entered, and reading one then kills the process (1 of 100 signals, on
    Python 3.11, to a thread that calls from C into Python; those of a thread that ends, alike).
    Signals that the job handles itself are left to it, and none is sent outside the main thread.
    A fork that does not call this, such as a worker of a data loader, answers into the same file.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    previous: Any = signal.getsignal(STACKS)
    inherited = getattr(previous, "func", None) is _answer
    if inherited and previous.args[1] == os.getpid():
        return
    if not inherited and {previous, signal.getsignal(MAIN_STACK)} != {signal.SIG_DFL}:
        return
    path = os.path.join(marks, f"stacks.{os.getpid()}.txt")
    try:
        fd = files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        signal.signal(STACKS, partial(_answer, fd, os.getpid()))
        signal.siginterrupt(STACKS, False)  # C code of the job may not know of EINTR
        faulthandler.register(MAIN_STACK, file=fd, all_threads=False, chain=False)
    except (OSError, RuntimeError, ValueError):  # then a hang has the kernel's view only
        return


def _answer(fd: int, pid: int, signum: int, frame: Any) -> None:
    """Here this thread has the interpreter's lock: the frames of all others are whole."""
    try:
        faulthandler.dump_traceback(fd, all_threads=True)
        os.write(fd, b"(all threads of %d)\n" % os.getpid())
    except Exception:  # a full disk is not the job's trouble
        pass
