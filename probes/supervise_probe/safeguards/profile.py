"""The command `profile`: a trace of the next steps by torch.profiler, for Perfetto.

Profiling changes no number, but makes steps slower: meanwhile the probe does not judge its cost. It
ends when the job starts a profiler of its own, and with the job. An error is a notice. torch itself
may write a line about it to the job's stderr.
"""

from __future__ import annotations

import os
import re
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Tuple

from ..errors import Refused
from ..runtime import files
from ..runtime.warning_stacklevel import uncounted

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.active_safeguards import InForce

LONGEST = 20  # steps; a trace grows by a few MB with each step of a large model
ENTRY_POINTS = ("_prepare_profiler", "_enable_profiler")  # every profiler of torch calls these


class Profile:
    """One trace at a time."""

    def __init__(self, context: ProbeContext, in_force: InForce) -> None:
        self._context, self._in_force = context, in_force
        self._part = context.guard.part("profile", share=1.0)
        self._profiler: Any = None
        self._path = ""
        self._first = self._left = self._done = 0
        self._entry_points: List[Tuple[str, Callable[..., Any]]] = []

    def do_profile(self, args: Dict[str, Any]) -> Dict[str, Any]:
        """Trace the next `steps` steps into the directory of `incident`, a file for each rank."""
        context, torch = self._context, self._context.torch
        steps = int(args.get("steps", 5))
        if not 1 <= steps <= LONGEST:
            raise Refused(f"profile of {steps} steps: 1 to {LONGEST}")
        if self._profiler is not None:
            raise Refused(f"a profile is being taken already: {self._path}")
        if torch.autograd._profiler_enabled():
            raise Refused("the job runs a profiler of its own")
        first = context.position.step
        self._path = _place(
            context.config.marks, str(args["incident"]), first, context.position.rank
        )
        kinds = torch.profiler.ProfilerActivity
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        profiler = torch.profiler.profile(
            activities=[kinds.CPU, kinds.CUDA] if cuda else [kinds.CPU], record_shapes=True
        )
        profiler.start()
        self._profiler, self._first = profiler, first
        self._left, self._done = steps, 0
        self._in_force.acting = True
        context.guard.blind = True
        self._patch_entry_points()
        return {"path": self._path, "first_step": first, "steps": steps}

    @property
    def busy(self) -> bool:
        """Whether a trace is being taken."""
        return self._profiler is not None

    def step_ended(self) -> None:
        """A step ended."""
        if self._profiler is not None:
            self._left -= 1
            self._done += 1
            if not self._left:
                self.end()

    def end(self, why: str = "") -> None:
        """Stop the trace, if there is one, and write it; `why`: the reason for an early end."""
        if self._profiler is not None:
            began = monotonic_ns()
            self._context.guard.run(self._part, self._write, why)
            self._context.position.held_ns += monotonic_ns() - began
            self._context.reporter.beat("step")

    def _write(self, why: str) -> None:
        profiler, self._profiler = self._profiler, None
        self._context.guard.blind = False
        self._restore_entry_points()
        aside = f"{self._path}.{files.token()}"
        try:
            profiler.stop()
            profiler.export_chrome_trace(aside)
            os.chmod(aside, files.FILE)
            os.replace(aside, self._path)
            size = os.path.getsize(self._path)
        except Exception as error:
            self._context.reporter.notice("note", f"profile: no trace was written: {error}")
            return
        text = f"profile of {self._done} steps from step {self._first} on: {self._path}"
        self._context.reporter.notice(
            "note",
            f"{text} ({why})" if why else text,
            {"path": self._path, "bytes": size, "first": self._first, "steps": self._done},
        )

    # ── a profiler of the job's own has priority ──────────────────────────────────────────────

    def _patch_entry_points(self) -> None:
        module = self._context.torch.autograd.profiler
        for name in ENTRY_POINTS:
            original = getattr(module, name, None)
            if original is not None:
                self._entry_points.append((name, original))
                setattr(module, name, self._ending_ours(original))

    def _ending_ours(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @uncounted
        def begin(*args: Any, **kwargs: Any) -> Any:
            self.end("the job started a profile of its own")
            return original(*args, **kwargs)

        return begin

    def _restore_entry_points(self) -> None:
        module = self._context.torch.autograd.profiler
        for name, original in self._entry_points:
            setattr(module, name, original)
        self._entry_points.clear()


def _place(marks: str, incident: str, step: int, rank: int) -> str:
    """Return where the trace goes: into the incident's own directory, beside its evidence."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", incident).lstrip(".")
    home = os.path.join(os.path.dirname(marks), "incidents", name)
    files.make_directory(home)
    return os.path.join(home, f"profile-{step}-rank-{rank}.json")
