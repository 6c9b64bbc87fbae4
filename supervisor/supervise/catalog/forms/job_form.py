"""The forms of a policy's sections `job` and `savepoints`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ...core.model.interfaces import Seconds
from ...core.model.preemption import GRACE_S, MARGIN_S
from ..schema.field_types import AtLeast, Doc
from .failure_form import FailureForm
from .runbook_form import RunbookName

Count = Annotated[int, AtLeast(1)]
LONGEST_MATMUL_S = 60.0  # the relaunch has ten minutes in all; project default
SomeSteps = Annotated[int, "steps", AtLeast(1)]


@dataclass(frozen=True)
class SavepointsForm:
    """Model state kept inside the job's process, for rollbacks."""

    every: Annotated[
        SomeSteps,
        Doc("steps between two savepoints, at least: they take 0.5 % of the time at most"),
    ]
    keep: Annotated[Count, Doc("how many are kept")] = 4
    max_bytes: Annotated[
        Count | None,
        Doc("maximum host memory for all of them; default: an eighth of the machine's"),
    ] = None
    spill: Annotated[
        Literal["disk", "none"],
        Doc("where savepoints go that do not fit in memory; none: they are dropped"),
    ] = "disk"
    max_disk_bytes: Annotated[
        Count | None,
        Doc("maximum disk space for them; default: a quarter of what is free at the start"),
    ] = None


@dataclass(frozen=True)
class CheckpointsForm:
    """The job's own checkpoints, and how they are protected."""

    glob: Annotated[
        tuple[str, ...],
        Doc(
            "paths, relative to the job's working directory; default: those that it announces. "
            "Files of another job do not count: name one directory, without wildcards"
        ),
    ] = ()
    verify: Annotated[
        tuple[Literal["load", "finite", "optimizer"], ...],
        Doc("checks besides size and hash"),
    ] = ("load", "finite")
    keep_good: Annotated[Count, Doc("newest verified ones that are pinned")] = 2
    pin: Annotated[
        Literal["copy", "link"],
        Doc("a link costs no space, and is lost if the job overwrites the file in place"),
    ] = "copy"
    settle: Annotated[Seconds, Doc("how long an unannounced one must be unchanged")] = 5.0
    restore_test: Annotated[
        Seconds | None, Doc("how often the newest pinned one is verified again")
    ] = 3600.0


@dataclass(frozen=True)
class OrphansForm:
    """Processes that go on training after the job's first process has ended."""

    watch: Annotated[Seconds, Doc("maximum time they are watched; 0: the run ends at once")] = 600.0


@dataclass(frozen=True)
class HealthForm:
    """What this host must have before the job is started on it again."""

    matmul: Annotated[
        Seconds | None,
        Doc(
            "how long each device multiplies matrices whose product is known; 0s: not at all; "
            "default: 5s on devices, and the CPU not at all"
        ),
    ] = None
    memory_gb: Annotated[
        Annotated[float, AtLeast(0.0)] | None,
        Doc("available memory; default: half of the most that the job had"),
    ] = None
    disk_gb: Annotated[
        Annotated[float, AtLeast(0.0)] | None,
        Doc("free space beside its checkpoints; default: as much as one takes"),
    ] = None

    def check(self) -> list[tuple[str, str]]:
        if self.matmul is None or 0.0 <= self.matmul <= LONGEST_MATMUL_S:
            return []
        return [("matmul", f"must be between 0 and {LONGEST_MATMUL_S:g}s, not {self.matmul:g}s")]


PLACEHOLDERS = ("checkpoint", "directory", "step")


@dataclass(frozen=True)
class RelaunchForm:
    """How the job is started again from a checkpoint.

    In `args` and `env`, {checkpoint} is the checkpoint's path, {directory} the one it is in, and
    {step} the count of steps in it: the PLACEHOLDERS. Another {word} is a mistake; `${word}`,
    `{{word}}` and all other braces stay as they are.
    """

    resume: Annotated[
        Literal["args", "library"],
        Doc("args: by `args` and `env`; library: through Trainer or Lightning"),
    ] = "args"
    args: Annotated[tuple[str, ...], Doc("added to the command")] = ()
    env: Annotated[Mapping[str, str], Doc("added to its environment")] = field(default_factory=dict)
    wait: Annotated[
        Literal["pause", "train"],
        Doc(
            "what a job of one rank does while the checkpoint that it is to go back to is verified"
        ),
    ] = "pause"


@dataclass(frozen=True)
class PreemptForm:
    """The job's own checkpoint before it is ended from outside."""

    grace: Annotated[
        Seconds, Doc("the longest that TERM, USR1 or USR2 waits for the checkpoint")
    ] = GRACE_S
    margin: Annotated[
        Seconds,
        Doc("how long before SLURM_JOB_END_TIME, and after a drain file, it is written at most"),
    ] = MARGIN_S
    drain: Annotated[
        str | None, Doc("file that asks for it when it is written; default: drain in the run")
    ] = None

    def check(self) -> list[tuple[str, str]]:
        longest = {"grace": 300.0, "margin": 3600.0}
        return [
            (name, f"must be between 1s and {most:g}s, not {value:g}s")
            for name, most in longest.items()
            if not 1.0 <= (value := getattr(self, name)) <= most
        ]


@dataclass(frozen=True)
class JobForm:
    """Properties of the job that the policy relies on."""

    rollback: Annotated[Literal["in_process"], Doc("savepoints inside the job's own process")] = (
        "in_process"
    )
    peak_flops: Annotated[
        Annotated[float, AtLeast(1.0)] | None,
        Doc("FLOP/s of its device, for mfu; default: by the device's name"),
    ] = None
    checkpoints: Annotated[CheckpointsForm, Doc("the job's own checkpoints")] = field(
        default_factory=CheckpointsForm
    )
    on_crash: Annotated[
        RunbookName | None,
        Doc("runbook when it ends by itself, such as restart; default: the run ends"),
    ] = None
    failures: Annotated[
        tuple[FailureForm, ...],
        Doc("classes of failures that are tried before the shipped ones (policies/failures)"),
    ] = ()
    logs: Annotated[
        tuple[str, ...],
        Doc("globs of log files, relative to its working directory: searched for known failures"),
    ] = ()
    relaunch: Annotated[
        RelaunchForm | None, Doc("how it is started again; default: it never is")
    ] = None
    health: Annotated[
        Literal["none"] | HealthForm | None,
        Doc("what is looked at before it is started again; none: nothing; default: all of it"),
    ] = None
    preempt: Annotated[
        Literal["checkpoint"] | PreemptForm | None,
        Doc(
            "checkpoint: a signal that the job does not handle, walltime, or a drain file makes "
            "it write a checkpoint before it ends; default: signals are passed on at once"
        ),
    ] = None
    steps: Annotated[
        SomeSteps | None,
        Doc(
            "optimizer steps of a whole run: an end with code 0 before them is SEV1; default: as "
            "Trainer or Lightning plan them"
        ),
    ] = None
    orphans: Annotated[
        OrphansForm, Doc("processes that go on training after the first one has ended")
    ] = field(default_factory=OrphansForm)
    probe_batch: Annotated[
        bool,
        Doc("run two rows of the first batch again at each savepoint and save, for comparison"),
    ] = False
    manifest: Annotated[
        tuple[str, ...],
        Doc("files whose hashes are recorded, per launch and checkpoint: tokenizer, list of data"),
    ] = ()
