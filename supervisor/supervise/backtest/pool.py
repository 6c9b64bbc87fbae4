"""A back-test over many recordings, spread over processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import TypeVar

from ..core.model.policy import Policy
from ..errors import InputError
from ..recordings.find import Source, sources
from ..recordings.table import NoStepsError
from .backtest_runner import outcomes, shadowed
from .playback import RUN, RunReader
from .score import Outcome

Part = TypeVar("Part")

LEAST_BYTES = 1 << 20  # per process; below that a process costs more than it saves

_policies: list[Policy] = []  # per worker: a policy holds closures and cannot be pickled
_extra: dict[str, str] = {}


def run(
    paths: Sequence[Path],
    policies: Sequence[str],
    extra: Mapping[str, str],
    jobs: int,
    left_out: list[str],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[Outcome]]:
    """Return, for every run below `paths`, the outcome of each policy, in order of the paths.

    Args:
        policies: names or files.
        extra: column -> metric id, in addition to the known aliases.
        jobs: processes; 0: as many as are useful.
        left_out: files in searched folders that are no recordings are appended here.
        progress: called with how many recordings are done, of how many; on any thread.

    Raises:
        InputError: a policy or a recording cannot be read.
    """
    loaded = [
        shadowed(policy) for policy in policies
    ]  # a mistake is reported before the work starts
    work = sources(paths, {RUN: RunReader()})
    jobs = min(jobs or _useful_jobs(work), len(work))
    if jobs <= 1:
        _init_worker(policies, extra, loaded)
        found = [_work(source) for source in counted(work, len(work), progress)]
    else:
        found = _spread(work, jobs, policies, extra, progress)
    for source, several in zip(work, found, strict=True):
        if several is None:
            left_out.append(f"{source.path}: no column of steps")
    kept = [each for several in found for each in several or ()]
    if not kept:
        raise InputError("no recording among these files", hint="; ".join(left_out[:3]))
    return kept


def _spread(
    work: Sequence[Source],
    jobs: int,
    policies: Sequence[str],
    extra: Mapping[str, str],
    progress: Callable[[int, int], None],
) -> list[list[list[Outcome]] | None]:
    # Largest first, so that the last process does not finish long after the others.
    order = sorted(range(len(work)), key=lambda i: -_size_bytes(work[i]))
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=_init_worker, initargs=(policies, extra)
    ) as pool:
        futures = {i: pool.submit(_work, work[i]) for i in order}
        done = count(1)
        for future in futures.values():
            future.add_done_callback(lambda _: progress(next(done), len(work)))
        try:
            return [futures[i].result() for i in range(len(work))]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def counted(
    parts: Iterable[Part], total: int, progress: Callable[[int, int], None]
) -> Iterator[Part]:
    """Yield the parts of a work, and report before each, and after the last, how many are done."""
    progress(0, total)
    for done, part in enumerate(parts, 1):
        yield part
        progress(done, total)


def _init_worker(
    policies: Sequence[str], extra: Mapping[str, str], loaded: Sequence[Policy] | None = None
) -> None:
    if (parent := parent_process()) is not None:
        Thread(target=_end_with, args=(parent,), daemon=True).start()
    _policies[:] = loaded or [shadowed(policy) for policy in policies]
    _extra.clear()
    _extra.update(extra)


def _end_with(parent: BaseProcess) -> None:
    """End this worker once its parent is gone: one that was killed told nobody."""
    parent.join()
    os._exit(1)


def _work(source: Source) -> list[list[Outcome]] | None:
    """Return a source's outcomes; None for a table found in a folder that has no steps."""
    try:
        return outcomes(source, _policies, _extra)
    except NoStepsError:
        if source.named:
            raise
        return None
    except OSError as error:
        where = error.filename or source.path
        raise InputError(f"{where}: cannot be read: {error.strerror}") from error


def _useful_jobs(work: Sequence[Source]) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, sum(map(_size_bytes, work)) // LEAST_BYTES))


def _size_bytes(source: Source) -> int:
    path = source.path
    files = [path] if path.is_file() else path.rglob("*")
    try:
        return sum(file.stat().st_size for file in files if file.is_file())
    except OSError:  # unreadable in part; its reader reports that
        return 0
