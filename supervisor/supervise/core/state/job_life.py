"""The life of the job's processes: launched, paused, told to end, ended, started again.

Kept by `handlers/job_lifecycle`; `runbooks` notes what the actions do to it, and
`incidents/pausing` a pause that ended by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

END_REQUESTED = "the end of the job was requested"  # why it is not started again


@dataclass(slots=True)
class Restarts:
    """The steps at which the job was started again, since it last went beyond all of them.

    Attributes:
        crashes: because it ended by itself. hangs: because it stood still.
    """

    crashes: list[int] = field(default_factory=list)
    hangs: list[int] = field(default_factory=list)

    def copy(self) -> Restarts:
        """Return an independent copy."""
        return Restarts(list(self.crashes), list(self.hangs))

    @staticmethod
    def farthest(steps: list[int], step: int) -> int:
        """Return the farthest of `steps`, -1 for none; a run that is beyond it forgets them."""
        found = max(steps, default=-1)
        if step > found:
            steps.clear()
        return found


@dataclass(slots=True)
class JobLife:
    """How it is with the job's processes.

    Attributes:
        world_size: how many ranks it has, as they say.
        launched: first attempt of the newest launch; frames of older ones are of the past.
        returncode: how the job ended, None while it runs. ended: nobody has answered that yet.
        over: nothing will run any more.
        paused: it was asked to pause, and not seen to go on by our word since.
        stopping: an action of ours ends it. stopped_by: who asked for that.
        end_requested: a signal asked for its end. interrupted: somebody typed that at its terminal.
        no_restart_reason: why it is not started again. restarts: where it was, up to now.
        unavailable: verb -> why the probe says that this job does not allow it.
    """

    world_size: int = 1
    launched: int = 0
    returncode: int | None = None
    ended: bool = False
    over: bool = False
    paused: bool = False
    stopping: bool = False
    stopped_by: str = "policy"
    end_requested: bool = False
    interrupted: bool = False
    no_restart_reason: str = ""
    restarts: Restarts = field(default_factory=Restarts)
    unavailable: dict[str, str] = field(default_factory=dict)

    def copy(self) -> JobLife:
        """Return an independent copy."""
        return replace(self, restarts=self.restarts.copy(), unavailable=dict(self.unavailable))
