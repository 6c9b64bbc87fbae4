"""Diagnosis of a job that stands still: the rank that the others wait for, and its place.

What is known of each rank, from outside: the state of its process, the CPU time it uses, its newest
step, its newest sign of life, and the collective that its training thread called last. The others
wait in a collective; the culprit is not in it, is in an earlier one, or cannot run at all. The
questions are asked in the order of how sure an answer is; where none is sure, that is said.

A rank that waits for its data loader is as good as the workers of that.

A collective is seen as far as Python calls it: the reductions of DistributedDataParallel inside the
backward are not. There the rank that has not come to its backward is the one.

Source: NCCL's Flight Recorder compares sequence numbers of ranks in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

NAMED = 3  # workers of a rank, of those that do the same only their number
RUNS = 0.1  # cores from which a rank computes: one that waits uses none, a busy host slows it


class Collective(NamedTuple):
    """The newest collective of a rank: how many it had called then, its name, whether it waits."""

    number: int
    name: str
    inside: bool


class LoaderWorker(NamedTuple):
    """A process that makes batches for a rank.

    Attributes:
        state, cpu, place: as of a rank. waits_for_lock: until another thread wakes it.
        activity: "busy" with a batch, "idle" until one is asked for, "" where its stack is unknown.
    """

    pid: int
    state: str
    cpu: float | None
    activity: str = ""
    place: str = ""
    waits_for_lock: bool = False


class RankStand(NamedTuple):
    """One rank that made no step for long.

    Attributes:
        state: "exited", "stopped" (SIGSTOP or a debugger), "disk" (uninterruptible), or "" for any
            other. cpu: cores that its process uses, None where that is not known.
        step: its newest, -1 before the first.
        collective: None where it called none that Python sees.
        place: where its main thread is in the job's own code, "" where that is not known.
        in_backward: that thread is inside the autograd engine. in_loader: it waits for the next
            batch. workers: of its loaders.
    """

    state: str
    cpu: float | None
    step: int
    collective: Collective | None = None
    place: str = ""
    in_backward: bool = False
    in_loader: bool = False
    workers: tuple[LoaderWorker, ...] = ()


class Standstill(NamedTuple):
    """Who holds the job up. `ranks` is empty where that is not known; `text` says so, too."""

    ranks: tuple[int, ...]
    text: str


_STATES = {
    "exited": "ended",
    "stopped": "is stopped (SIGSTOP or a debugger)",
    "disk": "waits in the kernel for a disk or a device, uninterruptibly",
}


def explain_standstill(ranks: Mapping[int, RankStand], pids: Mapping[int, int]) -> Standstill:
    """Return who holds the job up and how that shows.

    Args:
        ranks: what is known of each. pids: their processes, for commands to paste.
    """
    for state, activity in _STATES.items():
        matching = [rank for rank, stand in sorted(ranks.items()) if stand.state == state]
        if matching and (state != "disk" or len(matching) < len(ranks) or len(ranks) == 1):
            text = f"{name_ranks(matching)}: its process {activity}"
            if state == "stopped":
                pid = " ".join(str(pids.get(rank, "PID")) for rank in matching)
                text += f"; kill -CONT {pid} lets it go on"
            return Standstill(tuple(matching), text + _describe_others(ranks, matching))
    if len(ranks) == 1:
        ((rank, stand),) = ranks.items()
        return Standstill((rank,), f"rank {rank} {_doing(stand)}")
    return _by_collective(ranks) or _by_steps(ranks) or _by_backward(ranks) or _unknown(ranks)


def _by_collective(ranks: Mapping[int, RankStand]) -> Standstill | None:
    """Some wait in a collective that others have not come to, or came to another one."""
    inside = {
        rank: stand.collective
        for rank, stand in sorted(ranks.items())
        if stand.collective is not None and stand.collective.inside
    }
    if not inside:
        return None
    furthest = max(seen.number for seen in inside.values())
    late = [
        rank
        for rank, stand in sorted(ranks.items())
        if rank not in inside or inside[rank].number < furthest
    ]
    if late:
        if all(_waits_in_backward(ranks[rank]) for rank in late):
            calls = {rank: f"{seen.name} (call {seen.number})" for rank, seen in inside.items()}
            return _parted(ranks, calls | dict.fromkeys(late, "the backward"))
        waiting = sorted(set(ranks) - set(late))
        collective = ranks[waiting[0]].collective
        assert collective is not None
        reason = "; ".join(f"rank {rank} {_doing(ranks[rank])}" for rank in late)
        text = f"{reason}; {_waits(waiting)} in {collective.name} (call {furthest})"
        return Standstill(tuple(late), text)
    names = {rank: seen.name for rank, seen in inside.items()}
    if len(set(names.values())) > 1:
        return _parted(ranks, names, f" (call {furthest})")
    name = next(iter(names.values()))
    text = f"all {len(ranks)} ranks wait in {name} (call {furthest}): no rank is late, so "
    return Standstill((), text + "the network or the collective library does not get it done")


def _waits_in_backward(stand: RankStand) -> bool:
    return stand.in_backward and stand.cpu is not None and stand.cpu < RUNS


def _parted(
    ranks: Mapping[int, RankStand], places: Mapping[int, str], preceding: str = ""
) -> Standstill:
    """Return that ranks wait for each other in different places; fewer ones are those to name."""
    common, count = Counter(places.values()).most_common(1)[0]
    apart = [rank for rank, rank_place in sorted(places.items()) if rank_place != common]
    locations = [f"in {places[rank]}" for rank in apart]
    if len(apart) == 1 and ranks[apart[0]].place:
        locations[0] += f" at {ranks[apart[0]].place}"
    which = ", ".join(f"rank {rank} {there}" for rank, there in zip(apart, locations, strict=True))
    common_ranks = sorted(set(places) - set(apart))
    if count <= len(apart):
        text = f"the ranks took different paths: {which}, {name_ranks(common_ranks)} in {common}"
        text += preceding
        return Standstill((), text)
    alone = f"another path: it waits {locations[0]}"
    path = alone if len(apart) == 1 else f"other paths: {which}"
    text = f"{name_ranks(apart)} took {path}; {_waits(common_ranks)} in {common}{preceding}"
    return Standstill(tuple(apart), text)


def _by_steps(ranks: Mapping[int, RankStand]) -> Standstill | None:
    """Some made fewer steps than the others."""
    newest = max(stand.step for stand in ranks.values())
    behind = [rank for rank, stand in sorted(ranks.items()) if stand.step < newest]
    if not behind:
        return None
    reason = "; ".join(f"rank {rank} {_doing(ranks[rank])}" for rank in behind)
    return Standstill(tuple(behind), f"{reason}; the others made step {newest} and wait")


def _by_backward(ranks: Mapping[int, RankStand]) -> Standstill | None:
    """Some are in the backward, where gradients are reduced; others are not there yet."""
    late = [rank for rank, stand in sorted(ranks.items()) if not stand.in_backward]
    waiting = sorted(set(ranks) - set(late))
    if not waiting or not all(ranks[rank].place for rank in late):
        return None
    if not late:
        text = f"all {len(ranks)} ranks are in the backward: no rank is late, so the network or "
        return Standstill((), text + "the collective library does not get a reduction done")
    reason = "; ".join(f"rank {rank} {_doing(ranks[rank])}" for rank in late)
    return Standstill(tuple(late), f"{reason}; {_waits(waiting)} in the backward")


def _unknown(ranks: Mapping[int, RankStand]) -> Standstill:
    return Standstill(
        (),
        f"which of {len(ranks)} ranks the others wait for is unknown: all are at step "
        f"{max(stand.step for stand in ranks.values())}, and none is in a collective that Python "
        "sees; compare their stacks",
    )


def _doing(stand: RankStand) -> str:
    """Return what a rank does, with its place."""
    if stand.state in _STATES:
        activity = f"its process {_STATES[stand.state]}"
    elif stand.collective is not None and stand.collective.inside:
        activity = f"waits in {stand.collective.name} (call {stand.collective.number})"
    elif stand.in_loader and (stand.cpu is None or stand.cpu < RUNS):
        activity = "waits for data in next(loader)"
    else:
        activity = _motion(stand.cpu)
    location = f" at {stand.place}" if stand.place else " at a place that is not known"
    step_text = f", after step {stand.step}" if stand.step >= 0 else ", before its first step"
    return activity + location + step_text + (_workers(stand.workers) if stand.in_loader else "")


def _motion(cpu: float | None) -> str:
    return "is" if cpu is None else "computes" if cpu >= RUNS else "waits"


def _workers(workers: Sequence[LoaderWorker]) -> str:
    """Return what the workers of a loader do, those first that it may wait for."""
    texts = Counter(_activity(worker) for worker in workers if worker.activity != "idle")
    idle = sum(worker.activity == "idle" for worker in workers)
    if idle and not texts:
        return (
            f"; its {idle} workers are idle: no batch is asked for"
            if idle > 1
            else ("; its only worker is idle: no batch is asked for")
        )
    found = []
    for text, count in texts.most_common(NAMED):
        pids = [str(worker.pid) for worker in workers if _activity(worker) == text][:NAMED]
        more_text = f" and {count - NAMED} more" if count > NAMED else ""
        found.append(f"; worker pid {', '.join(pids)}{more_text} {text}")
    return "".join(found)


def _activity(worker: LoaderWorker) -> str:
    if worker.state in _STATES:
        return _STATES[worker.state]
    if not worker.activity:
        return "does not run the probe: its stack is not known"
    activity = "waits for a lock" if worker.waits_for_lock else _motion(worker.cpu)
    return f"{activity} at {worker.place or 'a place that is not known'}"


def _describe_others(ranks: Mapping[int, RankStand], found: Sequence[int]) -> str:
    inside = sorted(
        rank
        for rank, stand in ranks.items()
        if rank not in found and stand.collective is not None and stand.collective.inside
    )
    if not inside:
        return ""
    collective = ranks[inside[0]].collective
    assert collective is not None
    return f"; {_waits(inside)} in {collective.name} (call {collective.number})"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 2", or "ranks 0, 1, 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    ranks_text = ", ".join(map(str, ranks[:8]))
    return f"ranks {ranks_text}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}"


def _waits(ranks: Sequence[int]) -> str:
    return f"{name_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"
