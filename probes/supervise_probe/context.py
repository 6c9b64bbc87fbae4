"""Context of a process: its settings (probe.json), its rank, the objects that nearly every part
needs, and its reports.

The settings are read once: the supervisor may rewrite the file between two launches.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from time import monotonic_ns
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Callable, Mapping, NamedTuple, Optional, Sequence

from .runtime import files

if TYPE_CHECKING:
    from .runtime.guard import Gate, Guard
    from .runtime.scalars import Scalars
    from .torch_state.records import Position
    from .torch_state.registry import Registry


@dataclass(eq=False)
class ProbeContext:
    """One for each process: a forked child gets another.

    Attributes:
        torch: the job's module of that name.
        config: what the supervisor asked for.
        guard: runs pieces of the probe, and switches them off.
        gate: whether a hook must keep still.
        registry: which objects of the job are alive.
        scalars: brings numbers to the host.
        position: rank, step and attempt.
        reporter: beats, notices, status.
    """

    torch: Any
    config: Config
    guard: Guard
    gate: Gate
    registry: Registry
    scalars: Scalars
    position: Position
    reporter: Reporter


class Refused(Exception):  # noqa: N818, it is an answer and not a fault
    """A command that cannot be carried out; the text is one sentence for people, `facts` for us."""

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message)
        self.facts = facts


STATUS_EVERY = 64  # steps between two statuses when nothing happened


class Reporter:
    """Silent until the process is a rank.

    Attributes:
        writer: of this rank's segment, None before there is one.
        phase: of the newest beat.
        held: the job is paused: its status cannot wait for the end of a step.
    """

    def __init__(self, position: Position) -> None:
        self._position = position
        self.writer: Any = None
        self._mailbox: Any = None
        self._phases: dict[str, int] = {}
        self._describe: Callable[[], dict[str, Any]] = dict
        self.phase, self.held = "", False
        self._due, self._age = True, 0

    def connect(
        self,
        writer: Any,
        mailbox: Any,
        phases: dict[str, int],
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        """The process is a rank from now on.

        Args:
            phases: number of each phase on the wire. describe: returns the status.
        """
        self.writer, self._mailbox = writer, mailbox
        self._phases, self._describe = phases, describe

    def beat(self, phase: str) -> None:
        """Show a sign of life."""
        if self.writer is not None:
            self.phase = phase
            self.writer.write_heartbeat(monotonic_ns(), self._phases[phase])

    def notice(self, kind: str, message: str, data: Any = None, step: int = -1) -> None:
        """Say something about the watching itself, at the step under way or at `step`."""
        if self._mailbox is not None:
            notice_step = self._position.step if step < 0 else step
            self._mailbox.send_notice(kind, message, notice_step, data or {})
            self.status_changed()

    def status_changed(self) -> None:
        """The status is to be written at the next boundary; at once while the job is held."""
        self._due = True
        if self.held:
            self.write_status()

    def is_status_due(self) -> bool:
        """A step ended: whether the status is to be written now."""
        self._age += 1
        return self._due or self._age >= STATUS_EVERY

    def write_status(self) -> None:
        """Write it now."""
        self._due, self._age = False, 0
        if self.writer is not None:
            self.writer.write_status(self._describe())


class Config(NamedTuple):
    """The contents of probe.json. Directories are absolute paths.

    Attributes:
        marks: directory of the small files that explain a silent probe.
        savepoints: `{"every", "keep", "max_bytes"}` in steps, pieces, bytes; None: keep none.
            `spill`: directory for those beyond `max_bytes`, None: they are given up; without it
            beside the marks. `max_disk_bytes`: of all that are there, without it any number.
        safeguards: `{"skip_nonfinite": {"max", "per"}, "zero_nonfinite": {"max", "per"},
            "skip_outliers": {"max", "per", "spreads", "rise"}, "update_clip": {"window", "sigma",
            "max_gb"}}`, or some of them.
        drills: `[{"fault", "step", "params"}]`.
        lease_s: the longest that a pause lasts unless the supervisor renews it.
        sampling: steps between two samples by set, 0 for never, and `share`; see `sampling`.
        peak_flops: FLOP/s that the device can do at most; None: see `collectors.flops`.
        attempt: of this launch; frames count on from it at every rollback.
        first_step: what the first step is called: one more than the last in the checkpoint.
        counters: `collectors.COUNTERS` that this launch counts on from, by rank; under "all" those
            of the other ranks. Without them it counts from 0.
        resume: `{"how": "library", "path"}` of what this launch begins with, unless
            the job's own arguments say so.
        rewarm: `{"start", "steps"}` of the learning rate's first steps, or None.
        skip: `[first, last]` of steps whose update is dropped.
        quarantine: path of the manifest of what must not be trained on; need not be there.
        mechanisms: `{"every", "distance"}` in steps and `share` of the time, see
            `sampling.weight_pairs`; None: no pairs.
        tape: keep the newest steps on disk too, for a launch to come to be compared with.
        probe_batch: None: no batch is kept; else what the checkpoint that this launch begins
            with came with: `{"path", "value"}`, or `{"why"}` there is no value, or `{}`.
        keep_signals: what a scheduler sends to all processes waits for the supervisor.
        late: read values of the CPU as late as those of an accelerator; for tests.
    """

    run: str
    shm: str
    marks: str
    slots: int = 8192
    capacity: int = 64
    savepoints: Optional[dict[str, Any]] = None
    safeguards: Mapping[str, Any] = MappingProxyType({})
    drills: Sequence[Mapping[str, Any]] = ()
    lease_s: float = 60.0
    late: bool = False
    sampling: Mapping[str, Any] = MappingProxyType({})
    peak_flops: Optional[float] = None
    mechanisms: Optional[Mapping[str, float]] = None
    tape: bool = False
    attempt: int = 0
    first_step: int = 0
    counters: Mapping[str, Mapping[str, float]] = MappingProxyType({})
    resume: Optional[dict[str, Any]] = None
    rewarm: Optional[dict[str, Any]] = None
    skip: Sequence[Sequence[int]] = ()
    quarantine: Optional[str] = None
    probe_batch: Optional[dict[str, Any]] = None
    keep_signals: bool = False

    def counters_of(self, rank: int) -> Mapping[str, float]:
        """Return the counters that this rank counts on from, `{}` for none."""
        return self.counters.get(str(rank)) or self.counters.get("all") or {}


def read_config(path: str) -> Config:
    """Read probe.json.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON, or lacks `run` or `shm`.
    """
    raw = json.loads(files.read_file(path))
    if not isinstance(raw, dict) or not raw.get("run") or not raw.get("shm"):
        raise ValueError(f"{path} names no run and no shm directory")
    raw.setdefault("marks", os.path.splitext(path)[0])
    settings = {key: raw[key] for key in Config._fields if raw.get(key) is not None}
    return Config(**settings)


def rank_and_world(environ: Mapping[str, str], torch: Any = None) -> tuple[int, int]:
    """Return (rank, world size).

    As the process group says, if there is one: processes that a job spawns itself, and ranks of
    several machines, may have no or another rank in their environment. Else as torchrun or Slurm
    say; (0, 1) where neither does. No other rank is asked.
    """
    group = getattr(torch, "distributed", None)
    if group is not None and group.is_available() and group.is_initialized():
        return max(0, group.get_rank()), max(1, group.get_world_size())
    if "RANK" in environ:
        rank, world = environ["RANK"], environ.get("WORLD_SIZE", "1")
    elif "SLURM_PROCID" in environ:
        rank, world = environ["SLURM_PROCID"], environ.get("SLURM_NTASKS", "1")
    else:
        rank, world = "0", environ.get("WORLD_SIZE", "1")
    try:
        return max(0, int(rank)), max(1, int(world))
    except ValueError:
        return 0, 1
