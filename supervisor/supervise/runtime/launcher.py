"""Start of the job, the first time and again.

Every launch has a number of its own, the attempt, which exceeds those of all earlier launches and
rollbacks. The number stands in `probe.json`, from where the probe's frames have it, and in the
job's environment, from where a supervisor that comes later knows whether a launch has been made.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..checkpoints.registry import BatchFacts, RankCounters
from ..core import job_recipes
from ..core.model import redaction
from ..core.model.decisions import ACTING_MODES, plain_json
from ..core.model.payload import DrillOrder, Rewarm
from ..core.model.policy import Mechanisms, Policy, RelaunchSettings, Savepoints
from ..core.model.redaction import Redactor
from ..errors import ActionError, StoreError
from ..store.run_directory import RunDir
from . import environment
from .fencing import LEASE_S
from .host import OomCounters, memory_bytes
from .mechanisms import COPIES_PART
from .process import Process
from .process_tree import Terminal, start_ticks

if TYPE_CHECKING:
    from .logs import JobOutput

SAVEPOINT_SHARE = 8  # savepoints may take an eighth of the memory there is; project default
SAVEPOINT_TIME = 0.005  # share of the wall time; a dear savepoint makes the next one wait
SPILL_SHARE = 4  # and on disk a quarter of what is free at the start; project default
SLOTS, CAPACITY = 8192, 128  # frames, and values of each; 9 MB of shared memory per rank
LAUNCHED = "launch.json"  # of the run directory: the newest launch
UNFIT = "unfit.json"  # the host on which the job was not started again
ENVIRON = "environ.json"  # the job's environment as the user gave it, for later supervisors


@dataclass(frozen=True)
class Launch:
    """One launch of the run.

    Attributes:
        attempt: its number; the probe counts on from it at every rollback.
        step: the last optimizer step that is in the checkpoint, -1: it begins at the beginning.
        path: the checkpoint, "" without one.
        rewarm: of the learning rate.
        skip: `[first, last]` of steps whose update is dropped.
        probe_batch: what the job reported of it with the checkpoint, None: nothing.
        counters: of the steps in the checkpoint, by rank, see `checkpoints.registry.Entry`.
    """

    attempt: int = 0
    step: int = -1
    path: str = ""
    rewarm: Rewarm | None = None
    skip: Sequence[Sequence[int]] | None = None
    probe_batch: BatchFacts | None = None
    counters: RankCounters | None = None


class Launcher:
    """Starts the job of one run.

    Args:
        argv, environ: the command as the user gave it.
        directory: of the segments.
        drills: what the probe injects.
        output: keeps what the job writes, None: nobody does.
        adopt: makes a `Process` of a pid and its start time in ticks that is not our child, where
            we came later than it did.

    Attributes:
        directory: see above.
        oom_counters: of what the kernel has killed since the newest launch.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        run: RunDir,
        directory: Path,
        drills: Sequence[DrillOrder] = (),
        *,
        terminal: Terminal | None = None,
        output: JobOutput | None = None,
        adopt: Callable[[int, int], Process] | None = None,
    ) -> None:
        self._argv = list(argv)
        self._environ = dict(environ)
        self._run = run
        self.directory = directory
        self._drills = drills
        self._terminal = terminal
        self._output = output
        self._adopt = adopt
        self.oom_counters = OomCounters.here()
        self._newest: dict[str, int] | None = None  # launch that is not written down yet

    def start(self, policy: Policy, launch: Launch) -> Process:
        """Tell the probe what is new, and start the process; one that has been started is taken.

        Call `record_launch` once signals reach it: that waits for the disk.

        Raises:
            LaunchError: the command was not found or is not executable.
            StoreError: the probe cannot be drills, or the environment not be kept.
            ActionError: it has been started by somebody else.
        """
        name = f"{self._run.id}:{launch.attempt}"
        segments = self._existing(launch.attempt, name) if launch.attempt else None
        if segments is not None:
            return self._adopt_existing(*segments)
        config = probe_config(self._run, self.directory, policy, self._drills)
        argv, environ = list(self._argv), dict(self._environ)
        if not launch.attempt:
            self._run.write_secret(ENVIRON, environ)
        if launch.path:
            relaunch = policy.job.relaunch or RelaunchSettings()
            config |= _resuming(launch, relaunch.resume)
            if config["probe_batch"] is not None:
                config["probe_batch"] = dict(launch.probe_batch or {})
            argv += [
                job_recipes.fill_recipe(arg, launch.path, launch.step) for arg in relaunch.args
            ]
            for key, value in relaunch.env.items():
                environ[key] = job_recipes.fill_recipe(value, launch.path, launch.step)
        self._run.write_json("probe.json", config)
        environ = environment.child_environment(environ, self._run.probe_config_path, name)
        outputs = {} if self._output is None else self._output.outputs
        self.oom_counters.start()
        process = Process.start(argv, environ, terminal=self._terminal, outputs=outputs)
        environment.mark_directory_owner(self.directory, process.pid)
        ticks = start_ticks(process.pid) or 0
        self._newest = {"attempt": launch.attempt, "pid": process.pid, "start_ticks": ticks}
        return process

    def record_launch(self) -> None:
        """Keep who the job is, for a supervisor after us; the job comes first, if that fails."""
        newest, self._newest = self._newest, None
        if newest is not None:
            with suppress(StoreError):
                self._run.write_json(LAUNCHED, newest)

    @property
    def environ(self) -> Mapping[str, str]:
        """The job's environment as the user gave it."""
        return self._environ

    def close_output(self) -> None:
        """The job has ended: let what it had written last come to its end."""
        if self._output is not None:
            self._output.close()

    def _existing(self, attempt: int, name: str) -> tuple[int, int] | None:
        """Return pid and start time of this launch, if a supervisor before us has made it."""
        newest = last_launch(self._run)
        if newest is not None and newest["attempt"] == attempt:
            return newest["pid"], newest["start_ticks"]
        pid = environment.find_launched(name)
        ticks = None if pid is None else start_ticks(pid)
        return None if pid is None or ticks is None else (pid, ticks)

    def _adopt_existing(self, pid: int, ticks: int) -> Process:
        if self._adopt is None:
            raise ActionError(f"it has been started already, as process {pid}")
        return self._adopt(pid, ticks)


def last_launch(run: RunDir) -> dict[str, int] | None:
    """Return `attempt`, `pid` and `start_ticks` of the newest launch, None where there is none."""
    try:
        return dict(run.read_json(LAUNCHED))
    except StoreError:
        pid = environment.find_launched(f"{run.id}:0")  # where there was no time to write it down
        ticks = None if pid is None else start_ticks(pid)
        if pid is None or ticks is None:
            return None
        return {"attempt": 0, "pid": pid, "start_ticks": ticks}


def first_environment(run: RunDir) -> dict[str, str]:
    """Return the environment that the job was first started in. Raises StoreError."""
    return dict(run.read_secret(ENVIRON))


def make_redactor(
    argv: Sequence[str], environ: Mapping[str, str], policy: Policy, *also: Mapping[str, str]
) -> Redactor:
    """Return what knows the secrets of a run: those of the job, and of the supervisor's channels.

    Args:
        also: further environments, such as that of a supervisor that came later.
    """
    names = redaction.channel_variables(policy.notify)
    redactor = Redactor(environ, argv, names)
    for value in also:
        redactor.environment(value)
    return redactor.fresh()


def _resuming(launch: Launch, method: str) -> dict[str, Any]:
    """Return the settings that only the probe of a later launch gets."""
    return {
        "attempt": launch.attempt,
        "first_step": launch.step + 1,
        "counters": dict(launch.counters or {}),
        "resume": {"how": method, "path": launch.path} if method != "args" else None,
        "rewarm": msgspec.to_builtins(launch.rewarm),
        "skip": None if launch.skip is None else [list(pair) for pair in launch.skip],
    }


def probe_config(
    run: RunDir, directory: Path, policy: Policy, drills: Sequence[DrillOrder]
) -> dict[str, Any]:
    """Return the probe's settings. Below `approve` it gets no means to change the job."""
    may_act = policy.mode in ACTING_MODES
    return {
        "run": run.id,
        "package": str(environment.inject_dir().parent),
        "shm": str(directory),
        "marks": str(run.marks_path),
        "slots": environment.fitting_slots(directory, SLOTS),
        "capacity": CAPACITY,
        "savepoints": _savepoints(run, policy.savepoints)
        if may_act and policy.savepoints
        else None,
        "safeguards": msgspec.to_builtins(policy.safeguards) if may_act else {},
        "sampling": {**msgspec.to_builtins(policy.sampling), "share": policy.probe.share},
        "mechanisms": None if policy.mechanisms is None else _pairs(policy, policy.mechanisms),
        "tape": may_act and policy.job.relaunch is not None,
        "peak_flops": policy.job.peak_flops,
        "probe_batch": {} if policy.job.evaluate or (may_act and policy.job.probe_batch) else None,
        "keep_signals": may_act and policy.job.preempt is not None,
        "quarantine": str(run.quarantine_path),  # in every mode: a person may write it
        "drills": plain_json(drills),
        "lease_s": LEASE_S,
    }


def _pairs(policy: Policy, pairs: Mechanisms) -> dict[str, float]:
    share = COPIES_PART * min(pairs.share, policy.probe.share)  # they are in the step as well
    every = max(pairs.every, pairs.distance + 1)
    return {"every": every, "distance": pairs.distance, "share": share}


def _savepoints(run: RunDir, savepoints: Savepoints | None) -> dict[str, Any] | None:
    """Return the probe's settings of savepoints: how many, and how many bytes where."""
    if savepoints is None:
        return None
    free_bytes = shutil.disk_usage(run.marks_path.parent).free
    return {
        "share": SAVEPOINT_TIME,
        "every": savepoints.every,
        "keep": savepoints.keep,
        "max_bytes": savepoints.max_bytes or memory_bytes() // SAVEPOINT_SHARE,
        "max_disk_bytes": savepoints.max_disk_bytes or free_bytes // SPILL_SHARE,
        **({"spill": None} if savepoints.spill == "none" else {}),
    }
