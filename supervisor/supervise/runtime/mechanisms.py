"""Spectra of the weights of attention and of their changes, and routers, beside the job.

The probe leaves a pair of copies of a few matrices in the directory of the segments. A process of
the job's interpreter, at the lowest priority and the first to be killed, computes what
`supervise_offline.mechanisms` says, and the results are late frames of the stream `savepoint`. The
pair is removed, which asks the probe for another one, once that process is within its share of the
time. Nothing here waits, and the end of the job ends it.

Where a healthy run is named as reference, each result has its distance to that run too, in spreads:
of slow changes an own past says nothing, since it moves along.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from .. import system
from ..core.model.events import Event, LateFrame, Notice
from ..core.model.policy import Mechanisms
from ..errors import StoreError
from ..store import files
from ..store.run_directory import RunDir
from ..store.run_records import Row, read_rows
from ..system import Child

FILE = "weight-pair"  # as `supervise_probe.sampling.weight_pairs`
LIMIT_NS = 600_000_000_000  # for one pair; project default
LOWEST = 19  # niceness
COPIES_PART = 0.2  # of the share, for the copies in the job; also of that of the probe
PROCESS_PART = 1.0 - COPIES_PART  # of the share, for this process
LONGEST_LINE = 1 << 16
COMPARED = (
    *("dw_spectral_entropy", "qk_d2_spectral_entropy", "qk_d3_spectral_entropy"),
    *("spectral_radius", "ht_sr_alpha"),
)
METRICS = (
    *COMPARED,
    *(f"{name}_band" for name in COMPARED),
    *("qk_d2_norm", "qk_d3_ratio", "singular_entropy"),
    *("router_similarity_max", "router_conditioning_max", "router_conditioning_min"),
)
NEAREST, FEWEST, FLOOR = 5, 10, 0.05  # results that make a level; of a reference; spread, in logs
VALUES = 1024
MAX_STEP = 1 << 53


class Answer(msgspec.Struct, frozen=True):
    """One line of the process; `cpu_s` is what it has used since its start."""

    path: str = ""
    error: str = ""
    step: int = -1
    attempt: int = 0
    cpu_s: float = 0.0
    values: Mapping[str, float] = {}


class Head(msgspec.Struct, frozen=True):
    """What is needed of a pair's first line: the interpreter of the job."""

    python: str


class ReferenceCurves:
    """The results of a healthy run."""

    def __init__(self, rows: Iterable[Row]) -> None:
        """`rows`: those of a run, late frames included."""
        self._curves: dict[str, list[tuple[int, float]]] = {name: [] for name in COMPARED}
        for row in rows:
            for name in COMPARED:
                if row.values.get(name, 0.0) > 0.0:
                    self._curves[name].append((row.step, math.log(row.values[name])))
        self._curves = {n: sorted(c) for n, c in self._curves.items() if len(c) >= FEWEST}
        self._spreads = {name: self._spread(name) for name in self._curves}

    def __bool__(self) -> bool:
        return bool(self._curves)

    def distances(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Return how far each value is from the curve, in spreads; absent beyond its last step."""
        distances = {}
        for name, curve in self._curves.items():
            if values.get(name, 0.0) > 0.0 and curve[0][0] <= step <= curve[-1][0]:
                away = math.log(values[name]) - self._level(name, step)
                distances[f"{name}_band"] = away / self._spreads[name]
        return distances

    def _level(self, name: str, step: int, without: int = -1) -> float:
        """Return the median of the results nearest to a step, that of one step left out."""
        curve = [point for point in self._curves[name] if point[0] != without]
        middle = bisect_left(curve, (step, -math.inf))
        start = max(0, min(middle - NEAREST // 2, len(curve) - NEAREST))
        return statistics.median(value for _, value in curve[start : start + NEAREST])

    def _spread(self, name: str) -> float:
        """Return what the median of the absolute distances says of a normal distribution's sd."""
        curve = self._curves[name]
        away = [abs(value - self._level(name, step, without=step)) for step, value in curve]
        return max(FLOOR, 1.4826 * statistics.median(away))


class MechanismMonitor:
    """The process of one run. All calls are for the loop's thread.

    Args:
        directory: of the segments.
    """

    def __init__(self, settings: Mechanisms | None, directory: Path) -> None:
        self._settings, self._path = settings, directory / FILE
        self._process: Child | None = None
        self._began_ns = system.monotonic_ns()
        self._asked_ns = self._next_ns = 0
        self._spent_s = 0.0  # CPU time of the process, as of its newest answer
        self._is_answered = False  # the file is one that has its results
        self._line = b""
        self._reference: ReferenceCurves | None = None

    def poll(self, now_ns: int) -> Iterator[Event]:
        """Yield results, and what is wrong, once; look after the process."""
        settings = self._settings
        if settings is None:
            return
        if self._asked_ns:
            yield from self._take_answer(settings, now_ns)
        elif self._is_answered:
            if now_ns >= self._next_ns:
                with suppress(OSError):
                    self._path.unlink()
                self._is_answered = False
        elif self._path.exists():
            yield from self._ask(settings, now_ns)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def _ask(self, settings: Mechanisms, now_ns: int) -> Iterator[Event]:
        try:
            with self._path.open("rb") as file:
                head = msgspec.json.decode(file.readline(LONGEST_LINE), type=Head)
            if self._process is None:
                yield from self._read_reference(settings, now_ns)
                self._process = self._start(head.python, 0 if settings.share >= 1.0 else LOWEST)
            assert self._process.stdin is not None
            self._process.stdin.write(os.fsencode(self._path) + b"\n")
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            yield self._stop(now_ns, str(error))
        else:
            self._asked_ns, self._line = now_ns, b""

    def _start(self, python: str, niceness: int) -> Child:
        if not os.access(python, os.X_OK):
            python = sys.executable
        spec = importlib.util.find_spec("supervise_offline")
        assert spec is not None, "supervise_offline is part of this distribution"
        assert spec.origin is not None
        program = str(Path(spec.origin).with_name("mechanisms.py"))
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SUPERVISE")}
        environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        pipe = subprocess.PIPE
        command = [*files.run_as_owner_prefix(python), python, "-I", program, str(niceness)]
        process = Child(
            command, env=environ, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        return process

    def _take_answer(self, settings: Mechanisms, now_ns: int) -> Iterator[Event]:
        process = self._process
        assert process is not None
        assert process.stdout is not None
        with suppress(OSError):  # nothing yet
            self._line += os.read(process.stdout.fileno(), LONGEST_LINE)
        if not self._line.endswith(b"\n"):
            if process.poll() is not None:
                yield self._stop(now_ns, "the process that computes them was killed")
            elif now_ns - self._asked_ns > LIMIT_NS or len(self._line) > LONGEST_LINE:
                yield self._stop(now_ns, f"one pair took over {LIMIT_NS // 10**9} s")
            return
        try:
            answer = msgspec.convert(json.loads(self._line), Answer)
            is_possible = 0 <= answer.step < MAX_STEP and 0.0 <= answer.cpu_s < MAX_STEP
        except (ValueError, msgspec.MsgspecError):
            answer, is_possible = Answer(), False
        if answer.error or not is_possible:
            reason = answer.error or "the process that computes them gave no answer"
            yield self._stop(now_ns, reason)
            return
        self._asked_ns, self._is_answered = 0, True
        # As much again as the newest pair took has to fit; in the first the start of torch is, too.
        next_s = answer.cpu_s - self._spent_s if self._spent_s else 0.0
        self._spent_s = answer.cpu_s
        allowed = PROCESS_PART * settings.share
        self._next_ns = self._began_ns + int((answer.cpu_s + next_s) * 1e9 / allowed)
        values = {
            name: value
            for name, value in list(answer.values.items())[:VALUES]
            if math.isfinite(value)
        }
        if self._reference:
            values |= self._reference.distances(answer.step, values)
        yield LateFrame(now_ns, "savepoint", answer.attempt, answer.step, values)

    def _read_reference(self, settings: Mechanisms, now_ns: int) -> Iterator[Event]:
        """Read the run that the policy names; it may take a second, once."""
        if settings.reference is None:
            return
        try:
            self._reference = ReferenceCurves(
                read_rows(RunDir.open(Path(settings.reference)), late=True)
            )
            problem = "it has no spectra" if not self._reference else ""
        except (StoreError, OSError) as error:
            problem = str(error)
        if problem:
            text = f"mechanisms.reference: nothing is compared with {settings.reference}: {problem}"
            yield Notice(now_ns, "note", text)

    def _stop(self, now_ns: int, reason: str) -> Notice:
        """Give up for this run."""
        self.close()
        self._settings, self._asked_ns = None, 0
        with suppress(OSError):
            self._path.unlink()
        return Notice(now_ns, "note", f"no spectra of the weights from here on: {reason}")
