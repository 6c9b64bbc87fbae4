"""The checker of `cards.py`: which statements of a run's cards and messages are false.

It knows what was done to the run, the undisturbed run of the same program, and each frame. It reads
what is printed, and `incident.json` for the status and the rules; nothing that makes reports is
used. A statement that it cannot read counts as true.

- onset: within 5 steps of the fault (of a rate that creeps, of its doubling).
- before: within 2 % of the median of some 4 to 32 last values before the fault, or of the standard
  error of that median; a ratio, within 10 % of a value since then over one of these.
- value: there is such a value in a frame of the attempt that is spoken of.
- cause: the fault's, or said to be unknown; done, cost: the actions and skips on record.
- proof: the loss is at the level before the fault, or of the undisturbed run, where it is said so.
- next: its commands parse, and are not for a run that has ended; `nothing` where all is well.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import click
from cards_replay import Told

from supervise.cli import group
from supervise.core.model import Announced, Frame
from supervise.store import RunDir, read_audit, read_journal

NEAR, CREEP, FAR = 5, 16, 100  # steps; what begins later is another thing
WINDOWS = (4, 8, 16, 32)
SAME, ROUNDED, RATIO, LEVEL = 0.02, 0.006, 0.10, 1.05
LAST = 20  # steps at the end that say how it ended
GOOD_WINDOW = 8
SLOW_RATIO = 1.5  # times the time of a step, to be slow

SLOWLY = {"creep": CREEP, "attention_bias": FAR}  # kinds of faults that show so late
HEALTHY = ("none", "evaluates", "decays", "restarts")
# Fault -> words of its cause.
RATE, INPUT = r"learning.?rate|\blr\b|schedule", r"batch|data|input|target|label|token|loader"
MOMENTS, CRASH = r"moment|optimi[sz]er", "connection closed|crash"
ENDS = ("kill", "dead_rank", "full_disk", "crash", "hang", "resume_moments", "resume_schedule")
DATA = ("bad_batch", "bad_batches", "dark", "one_token", "repeated_tokens")
INPUTS = (*DATA, "heals", "new_data")
CAUSES = {
    **dict.fromkeys(("rate", "rate_stays", "creep", "lr_spike"), RATE),
    **dict.fromkeys(("bad_batch", "bad_batches", "heals", "new_data"), INPUT),
    **dict.fromkeys(("dark", "one_token", "slow_input", "repeated_tokens"), INPUT),
    "nan_loss": rf"{INPUT}|loss (is|was) (NaN|not finite)|NaN in the loss",
    **dict.fromkeys(("nan_grad", "overflow_storm"), r"grad"),
    **dict.fromkeys(("bit", "bit_flip", "weight_noise"), r"weight|parameter|tensor|\bbit\b"),
    "moments": MOMENTS,
    "resume_moments": rf"{MOMENTS}|{CRASH}",
    "resume_schedule": rf"{RATE}|{CRASH}",
    "attention_bias": r"attention",
    "hang": r"lock|wait|cards_job\.py:\d+|blocked|data",
    "kill": r"SIGKILL|signal 9|killed",
    "dead_rank": r"rank 1|SIGKILL|killed",
    "drift": r"rank|parameter|weight",
    "full_disk": r"No space left|full|disk|file ",
    "crash": r"crash|drill|error|exit",
}
RESUMED, SAVED = ("resume_moments", "resume_schedule"), 40
ENDED = ("JOB FINISHED", "JOB FINISHED, NOT RECOVERED")
LASTING = ("dark", "one_token", "rate_stays", "creep", "drift")
SLOW = ("slow_input", "hang", "evaluates")
TIMES = ("throughput", "host", "hang", "straggler", "input_stall", "data_stall")
METRICS = {
    "loss": "train_loss_raw",
    "train loss": "train_loss_raw",
    "train_loss_raw": "train_loss_raw",
    "lr": "learning_rate",
    "learning rate": "learning_rate",
    "learning_rate": "learning_rate",
    "grad norm": "grad_global_norm",
    "gradient norm": "grad_global_norm",
    "grad_global_norm": "grad_global_norm",
    "update norm": "update_norm",
    "update_norm": "update_norm",
    "step time": "step_time",
    "step_time": "step_time",
}
AGAIN = "STARTED AGAIN, NOT AS BEFORE"
END = "-"  # stands for an incident where a message is about none
LIVE_ONLY = (
    *("ack", "approve", "deny", "lr", "pause", "quarantine", "release", "reload", "resume"),
    *("rollback", "savepoint", "silence", "skip", "stop"),
)
N = r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
NAME = rf"\b({'|'.join(sorted(METRICS, key=len, reverse=True))})"
COMMAND = re.compile(r"supervise -?-?[a-z][a-z-]*(?: [^;·()\n]*)?")
RATIO_TEXT = r"(?: \(×[^)]*\))?"
ARROW = re.compile(rf"{NAME}(?: went)? {N} → (?:{N}|NaN|Inf){RATIO_TEXT}(?: at step (\d+))?")
BEFORE = re.compile(
    rf"{NAME} (?:= |is )?{N}(?: [a-z%/]+)? ?"
    rf"\((?:{N}(?: [a-z]+)? before(?: step \d+)?|before:? {N}(?: [a-z%/]+)?(?:, [^()]*)?|was {N})\)"
)
LIMIT = re.compile(rf"{NAME} {N}(?: [a-z%/]+)? \(before {N}(?: [a-z%/]+)?, limit {N}")
TIMES_OF = re.compile(rf"{NAME}(?: {N},)? (?:×{N}|{N} times its (?:baseline|level))")
FELL = re.compile(rf"{NAME} fell to {N} ?%")
UNCHANGED = re.compile(r"(?:\(|; )([^();]*) stayed as before")
AT_STEP = re.compile(rf"{NAME} {N} at step (\d+)")
PLAIN = re.compile(rf"{NAME} {N}(?=[ ,;]|$)(?! →| at step)")
ONSET = re.compile(
    r"moved(?: first)? \((\d+)\)|moved together,? in step (\d+)"
    r"|(?:from|since|first at|began (?:at|in)) step (\d+)"
)
STEPS = re.compile(r"\bsteps? (\d+)(?:(?:-|–| to )(\d+))?")
WORDS = re.compile(
    r"\b(?:skip reason|tier T\d|halted)\b|\bnot [a-z_]+\.[a-z_]+|×\d\S*e[+-]\d+"
    r"|\b[a-z]+(?:_[a-z]+)+\b(?![.:(])"
)
UNIT = {"ms": 1000.0, "s": 1.0}
NOTHING = re.compile(
    r"nothing was done|did nothing|^nothing: |the job was not changed"
    r"|none of its rules has an action|no automatic action"
)
STAYED = "stayed in its normal range"
BACK = re.compile(r"back in its normal range(?: at step (\d+))?|back to normal since step (\d+)")


@dataclass(frozen=True)
class Cell:
    """A run: a program and its fault, which begins at step `at`."""

    program: str
    fault: str
    at: int
    is_drill: bool = False

    @property
    def name(self) -> str:
        return f"{self.program}-{self.fault}".translate(str.maketrans(":=,", "___"))

    @property
    def plain(self) -> str:
        """The undisturbed run that it is compared with."""
        return self.program + ("-drill" if self.is_drill else "")

    @property
    def ranks(self) -> int:
        return 2 if self.program == "ddp" else 1

    @property
    def onsets(self) -> tuple[int, ...]:
        """Where it may be said to begin: what resumed wrongly did so at the checkpoint."""
        return (self.at, self.at // SAVED * SAVED) if self.kind in RESUMED else (self.at,)

    @property
    def kind(self) -> str:
        """The fault without its size."""
        return self.fault.partition(":")[0]


@dataclass(frozen=True)
class Finding:
    """A statement, and what is true; not `is_false`: it is not a word of people."""

    incident: str
    kind: str
    place: str
    said: str
    true: str
    is_false: bool = True

    @property
    def is_on_card(self) -> bool:
        return self.place.startswith(("card ", "status"))

    def text(self) -> str:
        return f"{self.kind}: “{self.said}” but {self.true}"

    def line(self, cell: Cell) -> str:
        mark = "FALSE" if self.is_false else "unclear"
        head = f"{cell.name} {self.incident} {mark} {self.kind} [{self.place}]"
        return f"{head} {self.said} ⟂ {self.true}"


@dataclass(frozen=True)
class Row:
    """A frame."""

    event: int
    step: int
    rank: int
    attempt: int
    values: Mapping[str, float]


@dataclass
class Truth:
    """What is known of a run.

    Attributes:
        rows, plain: frames of it, and of the undisturbed run.
        log: its audit log. code: exit code.
        without: (rule, step) of those that fired in the undisturbed run.
    """

    cell: Cell
    rows: Sequence[Row]
    plain: Sequence[Row]
    log: Sequence[Mapping[str, Any]]
    code: int
    without: Sequence[tuple[str, int]] = ()

    @classmethod
    def read(cls, cell: Cell, run: Path, plain: Path, made: Mapping[str, Any]) -> Truth:
        log, other = (list(read_audit(RunDir.open(path).audit_path)) for path in (run, plain))
        fired = [(r["rule"], r["step"]) for r in other if r["kind"] == "rule"]
        return cls(cell, frames(run), frames(plain), log, made["code"], fired)

    # ── the level before, and now ─────────────────────────────────────────────────────────────────

    def series(self, metric: str, *, plain: bool = False) -> list[tuple[int, float]]:
        """Return (step, value) of rank 0."""
        rows = self.plain if plain else self.rows
        return [(r.step, r.values[metric]) for r in rows if r.rank == 0 and metric in r.values]

    def levels(self, metric: str) -> list[tuple[float, float]]:
        """Return the levels just before the fault that may be given, each with its tolerance."""
        of_job: dict[int, list[float]] = {}
        for row in self.plain:
            if metric in row.values and row.step < self.cell.at:
                of_job.setdefault(row.step, []).append(row.values[metric])
        past = [v for step, v in self.series(metric, plain=True) if step < self.cell.at]
        if metric == "step_time":  # of this run: another one has had its machine's own load
            past = [v for step, v in self.series(metric) if step < self.cell.at]
        found = self._levels(past)
        if self.cell.kind == "creep":  # it may be seen so late, from values as high
            rows = self.series(metric)
            for late in range(1, CREEP + 1):
                found += self._levels([v for step, v in rows if step < self.cell.at + late])
        return found + (self._levels([*map(mean, of_job.values())]) if self.cell.ranks > 1 else [])

    def _levels(self, past: Sequence[float]) -> list[tuple[float, float]]:
        found = [(past[-1], SAME * abs(past[-1]))] if past else []
        for size in WINDOWS:
            if len(part := past[-size:]) == size and all(map(math.isfinite, part)):
                middle = median(part)
                spread = 1.4826 * median([abs(v - middle) for v in part])
                error = 1.25 * spread / math.sqrt(size)
                found.append((middle, max(SAME * abs(middle), error) + ROUNDED * abs(middle)))
        return found

    def since(self, metric: str, event: int) -> list[Row]:
        """Return the frames from the fault to an event."""
        first = self.cell.at - NEAR
        return [r for r in self.rows if metric in r.values and r.step >= first and r.event <= event]

    # ── how it ended ──────────────────────────────────────────────────────────────────────────────

    @property
    def bound(self) -> float:
        """The highest loss just before the fault, and a tenth."""
        past = [v for s, v in self.series("train_loss_raw", plain=True) if s < self.cell.at]
        return 1.1 * max(past[-32:], default=math.inf)

    @property
    def highest(self) -> float:
        """The highest loss of the last steps before the fault."""
        past = [v for s, v in self.series("train_loss_raw", plain=True) if s < self.cell.at]
        return 1.02 * max(past[-GOOD_WINDOW:], default=math.inf)

    def level_at(self, step: int) -> float | None:
        """Return the mean loss of the newest attempt in the steps up to `step`."""
        rows = [
            r for r in self.rows if r.rank == 0 and r.step <= step and "train_loss_raw" in r.values
        ]
        last = [r.values["train_loss_raw"] for r in rows if r.attempt == rows[-1].attempt][-LAST:]
        return mean(last) if last else None

    def is_well(self, step: int) -> bool | None:
        """Return whether the loss is as before, or as undisturbed, up to a step; None: no loss."""
        now, levels = self.level_at(step), self.levels("train_loss_raw")
        if now is None or not levels:
            return None
        same = [v for s, v in self.series("train_loss_raw", plain=True) if step - LAST < s <= step]
        best = max([max(level + slack for level, slack in levels), *([mean(same)] if same else [])])
        return bool(now <= LEVEL * best)

    def is_as_undisturbed(self, step: int) -> bool:
        """Return whether the loss is that of the undisturbed run, up to a step."""
        now = self.level_at(step)
        rows = self.series("train_loss_raw", plain=True)
        same = [v for s, v in rows if step - LAST < s <= step]
        return now is not None and bool(same) and now <= LEVEL * mean(same)

    @property
    def last_step(self) -> int:
        return max((r.step for r in self.rows), default=-1)

    # ── what was done ─────────────────────────────────────────────────────────────────────────────

    def done(self, event: int) -> list[tuple[str, Mapping[str, Any]]]:
        """Return (verb, result) of the actions that changed the job, up to an event."""
        orders = {
            r["data"]["action"]["id"]: r["data"]["action"]
            for r in self.log
            if r["kind"] == "intent"
        }
        commits = [r for r in self.log if r["kind"] == "commit" and r["event"] <= event]
        every = (
            (orders[r["data"]["action"]["id"]], r["data"].get("result") or {}) for r in commits
        )
        return [(order["verb"], result) for order, result in every if order["touches_job"]]

    def is_withdrawn_behind_rollback(self) -> bool:
        """Return whether a runbook was withdrawn after a rollback."""
        back = [r["event"] for r in self.log if r["kind"] == "commit" and "rollback" in r["reason"]]
        ends = [r["event"] for r in self.log if "withdrawn" in (r.get("reason") or "")]
        return bool(back) and any(event > back[0] for event in ends)

    def skipped(self, event: int) -> list[int]:
        """Return the steps whose updates were kept from the weights by us, up to an event."""
        found = set()
        for record in self.log:
            about = record.get("data") or {}
            is_one = about.get("what") == "safeguard" and record["event"] <= event
            if is_one and str(about["details"].get("order", "")).startswith("skip"):
                found.add(about["at_step"])
        return sorted(step for step in found if step is not None)


def frames(path: Path) -> list[Row]:
    """Return the frames of a run."""
    names: dict[int, tuple[str, ...]] = {}
    found = []
    for number, event in read_journal(RunDir.open(path).journal_path):
        if isinstance(event, Announced):
            names[event.rank] = event.names
        elif isinstance(event, Frame):
            pairs = zip(names.get(event.rank, ()), event.values, strict=False)
            values = {name: value for name, value in pairs if value is not None}
            found.append(Row(number, event.step, event.rank, event.attempt, values))
    return found


@dataclass(frozen=True)
class Line:
    """A line that people read; `event`: what was known then; `step`: newest one."""

    incident: str
    place: str
    text: str
    event: int
    step: int
    attempt: int
    is_card: bool
    whole: str

    @property
    def prose(self) -> str:
        """It without commands and paths."""
        return re.sub(r"\S*/\S+", "", COMMAND.sub("", self.text))


def lines(says: Told) -> Iterator[Line]:
    """Yield the lines of cards and messages, but for the little plots."""
    for incident, (about, card) in says.cards.items():
        closed = about["closed"] or about["updated"]
        for n, text in enumerate(card.splitlines()):
            head, _, rest = text.partition(" ")
            if n == 0:
                head, rest = "title", text
            if head not in ("Loss", "State"):
                at = 10**9, closed["step"], closed["attempt"]
                yield Line(incident, f"card {head.lower()}", rest.strip(), *at, True, card)
    for sent in says.messages:
        for n, text in enumerate(sent.text.splitlines()):
            head, _, rest = text.strip().partition(" ")
            if n == 0:
                head, rest = "title", text
            if head not in ("loss", "why"):
                place = f"{sent.kind} {head}"
                at = sent.event, sent.step, sent.attempt
                yield Line(sent.incident or END, place, rest.strip(), *at, False, sent.text)


def judge(truth: Truth, says: Told) -> Iterator[Finding]:
    """Yield the statements that are false, and those that are no words, once each."""
    seen = set()
    for finding in _judged(truth, says):
        key = finding.incident, finding.kind, finding.said, finding.is_false
        if key not in seen:
            seen.add(key)
            yield finding


def _judged(truth: Truth, says: Told) -> Iterator[Finding]:
    documents = {incident: about for incident, (about, _) in says.cards.items()}
    for line in lines(says):
        about = documents.get(line.incident, {})
        is_about_fault = _is_about_fault(truth, about)
        for check in (_steps, _values, _done, _cost, _next, _proof, _unclear):
            for kind, said, true in check(truth, line, about):
                yield Finding(line.incident, kind, line.place, said, true, kind != "words")
        if is_about_fault:
            checks = (
                *_onset(truth, line),
                *_cause(truth, line, about),
                *_rate(truth, line),
                *_ours(truth, line),
            )
            for kind, said, true in checks:
                yield Finding(line.incident, kind, line.place, said, true)
    yield from _crash(truth, says)
    for incident, about in documents.items():
        for kind, said, true in _status(truth, about):
            yield Finding(incident, kind, "status", said, true)


False_ = tuple[str, str, str]  # kind, said, true


def _is_about_fault(truth: Truth, about: Mapping[str, Any]) -> bool:
    """Return whether an incident is about the fault, and not about a busy machine."""
    cell = truth.cell
    if not about or cell.kind in HEALTHY or _is_without(truth, about):
        return False
    rules = [rule["rule"] for rule in about["rules"]]
    of_time = bool(rules) and all(rule.startswith(TIMES) for rule in rules)
    since = about["opened"]["step"] - cell.at
    return -NEAR <= since <= FAR and (not of_time or cell.kind in SLOW)


def _is_without(truth: Truth, about: Mapping[str, Any]) -> bool:
    """Return whether the rule that opened it also fired without the fault, at about this step."""
    step, rules = about["opened"]["step"], about["rules"]
    return bool(rules) and any(
        rule == rules[0]["rule"] and abs(at - step) <= LAST for rule, at in truth.without
    )


def _rate(truth: Truth, line: Line) -> Iterator[False_]:
    """A rate that follows its schedule is no symptom and no cause."""
    rows = truth.series("learning_rate")
    plain = dict(truth.series("learning_rate", plain=True))
    same = all(math.isclose(v, plain[s], rel_tol=1e-3) for s, v in rows if s in plain)
    rate = r"\b(?:lr|learning rate)"
    moved = rf"{rate} (?:×|went|\(\d)|{rate} (?:and [^(;]*)?moved|{rate}, [^(;]*moved"
    found = re.search(moved, line.prose)
    if found and rows and same and not line.place.endswith("title"):
        yield "schedule", found[0], "the rate followed its schedule"


def _numbers(match: re.Match[str], *groups: int) -> float:
    return float(next(match[g] for g in groups if match[g] is not None))


def _onset(truth: Truth, line: Line) -> Iterator[False_]:
    """Judge where it is said to have begun: the earliest of what a line names."""
    late = SLOWLY.get(truth.cell.kind, NEAR)
    named = [int(step) for step in re.findall(r"at step (\d+)", line.prose)]
    for match in ONSET.finditer(line.prose):
        step, before = int(_numbers(match, 1, 2, 3)), line.prose[: match.start()]
        after = line.prose[match.end() :][:30]
        is_ours = before.endswith(("paused ", "or without it ")) or "range" in before
        is_ours |= bool(re.match(r" on|[^.;]*(goes on|restored)", after))
        is_first = step < truth.cell.at or not any(earlier < step for earlier in named)
        is_near = any(begun - NEAR <= step <= begun + late for begun in truth.cell.onsets)
        if is_first and not is_ours and not is_near:
            said = line.prose[max(0, match.start() - 40) : match.end()]
            yield "onset", said, f"fault at {truth.cell.at}"


def _steps(truth: Truth, line: Line, about: Mapping[str, Any]) -> Iterator[False_]:
    newest = max((r.step for r in truth.rows if r.event <= line.event), default=-1)
    for match in STEPS.finditer(line.prose):
        for text in filter(None, match.groups()):
            if int(text) > newest + 1 and "until" not in line.prose[: match.start()][-12:]:
                yield "step", match[0], f"the newest step is {newest}"


def _values(truth: Truth, line: Line, about: Mapping[str, Any]) -> Iterator[False_]:
    text = line.prose
    opened = about.get("opened", {}).get("step", truth.cell.at)
    if not truth.cell.at - NEAR <= opened <= truth.cell.at + FAR:
        return
    if _is_about_fault(truth, about):
        yield from _slower(truth, line)
    for match in ARROW.finditer(text):
        metric = METRICS[match[1]]
        yield from _before(truth, metric, float(match[2]), match[0])
        step = int(match[4]) if match[4] else None
        if match[3] is not None:
            yield from _value(truth, line, metric, float(match[3]), step, match[0])
    for match in BEFORE.finditer(text):
        metric = METRICS[match[1]]
        yield from _before(truth, metric, _numbers(match, 3, 4, 5), match[0])
    yield from _compared(truth, line)
    # The loss of the test batch is of rows that the plain run did not have.
    for match in AT_STEP.finditer(re.sub(r"\(test batch: [^)]*\)", "", text)):
        yield from _value(truth, line, METRICS[match[1]], float(match[2]), int(match[3]), match[0])
    if line.place in ("opened what", "updated what"):
        for match in PLAIN.finditer(text):
            yield from _value(truth, line, METRICS[match[1]], float(match[2]), None, match[0])
    if match := re.search(r"[^;,]*(?:= |limit )unknown[^;,]*", text):
        yield "value", match[0].strip(), "it is measured"
    for match in TIMES_OF.finditer(text):
        yield from _ratio(truth, line, METRICS[match[1]], _numbers(match, 3, 4), match[0])
    for match in FELL.finditer(text):
        yield from _ratio(truth, line, METRICS[match[1]], float(match[2]) / 100.0, match[0])


def _compared(truth: Truth, line: Line) -> Iterator[False_]:
    """Judge values that stand beside a limit, or the level before."""
    text = line.prose
    for match in LIMIT.finditer(text):
        value, before, limit = map(float, match.groups()[1:])
        if (value > before) is not (value > limit):
            yield "limit", match[0], "the value is within it"
    for match in re.finditer(rf"{N} (ms|s), {N} (ms|s) before", text):
        yield from _before(truth, "step_time", float(match[3]) / UNIT[match[4]], match[0])
    for match in re.finditer(rf"rate went from {N} to {N} at step (\d+)", text):
        yield from _before(truth, "learning_rate", float(match[1]), match[0])
        yield from _value(truth, line, "learning_rate", float(match[2]), None, match[0])
    for match in re.finditer(rf"NOT come back into [^:]*: {N} at the end, {N} before", text):
        yield from _before(truth, "train_loss_raw", float(match[2]), match[0])
        now = truth.level_at(line.step)
        if now is not None and abs(float(match[1]) - now) > RATIO * now:
            yield "value", match[0], f"it is {now:.4g}"


def _slower(truth: Truth, line: Line) -> Iterator[False_]:
    """Judge "N times as long": the median of some first steps over that before."""
    for match in re.finditer(rf"{N} ?(?:x|×|times) as long", line.prose):
        rows = [r.values["step_time"] for r in truth.since("step_time", line.event)][NEAR:]
        levels = [level for level, _ in truth.levels("step_time")]
        past = [v for s, v in truth.series("step_time") if s < truth.cell.at][-LAST:]
        levels += [median(past)] if past else []
        ratios = [median(rows[:n]) / v for n in (8, 16, 32, 64) if rows[:n] for v in levels]
        if ratios and not min(ratios) * 0.8 <= float(match[1]) <= max(ratios) * 1.2:
            yield "ratio", match[0], f"it is {min(ratios):.3g} to {max(ratios):.3g}"


def _before(truth: Truth, metric: str, value: float, said: str) -> Iterator[False_]:
    levels = truth.levels(metric)
    slack = ROUNDED * abs(value)
    if levels and not any(abs(value - level) <= error + slack for level, error in levels):
        yield (
            "before",
            said,
            f"it was {levels[0][0]:.4g}, medians {_listed(m for m, _ in levels[1:])}",
        )


def _value(
    truth: Truth, line: Line, metric: str, value: float, step: int | None, said: str
) -> Iterator[False_]:
    rows = truth.since(metric, line.event)
    if step is not None:
        every = (r for r in truth.rows if r.step == step and r.event <= line.event)
        rows = [r for r in every if metric in r.values]
    of_job = {r.step: mean(o.values[metric] for o in rows if o.step == r.step) for r in rows}
    both = [(r, {r.values[metric], of_job[r.step]}) for r in rows]  # a rank's, and the job's
    near = [r for r, values in both if any(abs(v - value) <= ROUNDED * abs(value) for v in values)]
    if not near and rows:
        yield "value", said, f"it is {_listed(r.values[metric] for r in rows[-3:])}"
    is_news = line.place.startswith(("opened", "updated"))
    if near and is_news and all(r.attempt < line.attempt for r in near):
        yield "attempt", said, f"a number of attempt {near[-1].attempt}, it is {line.attempt}"


def _ratio(truth: Truth, line: Line, metric: str, ratio: float, said: str) -> Iterator[False_]:
    levels = [level for level, _ in truth.levels(metric) if level]
    rows = truth.since(metric, line.event)
    ratios = [r.values[metric] / level for r in rows for level in levels]
    ratios = [r for r in ratios if math.isfinite(r)]
    if ratios and not any(abs(r - ratio) <= RATIO * abs(ratio) for r in ratios):
        yield "ratio", said, f"it is {min(ratios):.3g} to {max(ratios):.3g} times what it was"


def _done(truth: Truth, line: Line, about: Mapping[str, Any]) -> Iterator[False_]:
    text, done, skipped = line.prose, truth.done(line.event), truth.skipped(line.event)
    opened = about.get("opened", {}).get("record", 0)
    verbs = [verb for verb, _ in done]
    if (match := NOTHING.search(text)) and (verbs or skipped) and about and opened is not None:
        acts = verbs or [f"skipped {len(skipped)} updates, from step {skipped[0]}"]
        mine = any(s >= about["breach_step"] for s in skipped) or about["did"]["acted"]
        if mine:
            yield "done", match[0], f"done: {', '.join(dict.fromkeys(acts))}"
    under_way = re.search(r"\n +did +.*?([a-z ]+ under way)", line.whole)
    if "no automatic action" in text and under_way:
        yield "contradiction", "no automatic action yet", under_way[1]
    if "no rollback needed" in text and "rollback" in verbs:
        yield "contradiction", "no rollback needed", "rolled back"
    again = re.search(r"\b(go|roll) back\b[^;]*", text) if line.place.endswith("next") else None
    if again and "rollback" in verbs:
        yield "contradiction", again[0], "rolled back"
    if truth.cell.kind == "drift" and "the weights are good" in text:
        yield "proof", "the weights are good", "those of rank 1 are others"
    restored, withdrawn = text.find("restored"), text.find("withdrawn")
    if 0 <= restored < withdrawn and not truth.is_withdrawn_behind_rollback():
        yield "order", text[withdrawn - 25 : withdrawn + 10].strip(), "that was before the rollback"
    back = [int(result["step"]) for verb, result in done if verb == "rollback" and "step" in result]
    for match in re.finditer(r"(?:savepoint|weights) of step (\d+) (?:restored|are back)", text):
        if int(match[1]) not in back:
            yield "done", match[0], f"rolled back to {back or 'nothing'}"
    for match in re.finditer(r"skipped the updates? of steps? (\d+)", text):
        if int(match[1]) not in skipped:
            yield "done", match[0], f"skipped are {skipped[:5] or 'none'}"


def _cost(truth: Truth, line: Line, about: Mapping[str, Any]) -> Iterator[False_]:
    text, done, skipped = line.prose, truth.done(line.event), truth.skipped(line.event)
    lost = [
        int(result["from_step"]) - int(result["step"])
        for verb, result in done
        if verb == "rollback" and "from_step" in result
    ]
    for match in re.finditer(r"progress of (\d+) steps? lost", text):
        if int(match[1]) not in (sum(lost), *lost):
            yield "cost", match[0], f"lost are {sum(lost)}"
    for match in re.finditer(r"(\d+) updates? (?:was |were )?skipped", text):
        own = [s for s in skipped if s >= about.get("breach_step", 0)]
        orders = sum(verb == "skip_step" for verb, _ in done)
        if not orders and int(match[1]) not in (len(own), len(skipped)):
            yield "cost", match[0], f"skipped are {len(own)}"
    paused = sum(float(result.get("held_s") or 0.0) for _, result in done)
    for match in re.finditer(rf"{N} s paused|paused {N} s", text):
        if abs(_numbers(match, 1, 2) - paused) > 0.1 and line.is_card:
            yield "cost", match[0], f"paused were {paused:.1f} s"
    for match in re.finditer(r"(\d+) steps? repeated", text):
        again = {r.step for r in truth.rows if r.rank == 0 and r.event <= line.event and r.attempt}
        made = [r.step for r in truth.rows if r.rank == 0 and not r.attempt and r.step in again]
        if line.is_card and abs(int(match[1]) - len(made)) > 1:
            yield "cost", match[0], f"repeated are {len(made)}"
    for match in re.finditer(r"the weights were lost at step (\d+)", text):
        of_step = [r.values for r in truth.rows if r.step == int(match[1])]
        numbers = [v.get(n, 0.0) for v in of_step for n in ("train_loss_raw", "grad_global_norm")]
        if int(match[1]) not in skipped or all(map(math.isfinite, numbers)):
            yield "cost", match[0], "all was finite in that step, or it was not skipped"
    yield from _held(truth, line)
    for match in re.finditer(rf"\({N} did the harm\)", text):
        yield from _value(truth, line, "learning_rate", float(match[1]), None, match[0])


def _held(truth: Truth, line: Line) -> Iterator[False_]:
    """Judge what slow steps cost, and at which rate the job is held."""
    text = line.prose
    for match in re.finditer(rf"the steps took {N} s longer", text):
        times = [v for s, v in truth.series("step_time") if s >= truth.cell.at]
        level = truth.levels("step_time")
        lost = sum(max(0.0, v - level[-1][0]) for v in times) if level else 0.0
        if level and not 0.5 * lost - 1.0 <= float(match[1]) <= 1.5 * lost + 1.0:
            yield "cost", match[0], f"it was {lost:.1f} s"
    for match in re.finditer(rf"rate (?:is )?capped at {N}", text):
        acts = [int(r["ack_step"]) for verb, r in truth.done(line.event) if verb == "hold_rate"]
        rates = [v for s, v in truth.series("learning_rate") if acts and s > acts[-1] + 2]
        if not acts or any(rate > 1.01 * float(match[1]) for rate in rates):
            yield "done", match[0], f"it was {max(rates, default=0.0):.3g}"


def _ours(truth: Truth, line: Line) -> Iterator[False_]:
    """What we did to the rate is no event of the job."""
    acts = [
        int(result["ack_step"])
        for verb, result in truth.done(line.event)
        if verb in ("hold_rate", "lr_scale", "rollback") and "ack_step" in result
    ]
    for match in re.finditer(r"learning rate \S+ to \S+ \(step (\d+)\)", line.prose):
        if any(0 <= int(match[1]) - act <= NEAR for act in acts):
            yield "cause", match[0], "it was our own action"


def _next(truth: Truth, line: Line, about: Mapping[str, Any]) -> Iterator[False_]:
    if not line.place.endswith("next"):
        return
    for command in COMMAND.findall(line.text):
        words = re.sub(r"\. (No evidence|Evidence: ).*", "", command).strip().rstrip(".,")
        if reason := refusal(words):
            yield "next", words, reason
        elif line.is_card and words.split()[1] in LIVE_ONLY:
            yield "next", words, "the run has ended"
    if _is_about_fault(truth, about):
        yield from _restart(truth, line)
    match = re.search(r"[^;]*(architecture|QK-norm|attention logits)[^;]*", line.prose)
    if match and truth.cell.kind != "attention_bias":
        yield "advice", match[0].strip(), f"it was {truth.cell.fault}"
    if re.match(r"nothing\b", line.text) and (open_ := re.search(r"; (but [^;\n]*)", line.whole)):
        yield "contradiction", "nothing to do", open_[1]
    again = re.search(r"start the job again(?![^;]*(fix|again|first))", line.prose)
    if truth.cell.kind == "hang" and again:
        yield "next", again[0], "the deadlock comes again, at the same step"
    if re.match(r"nothing\b(?! is asked| to do now; for tomorrow)", line.text) and line.is_card:
        if truth.code != 0:
            yield "next", "nothing", f"the job ended with code {truth.code}"
        elif truth.cell.kind in LASTING and about["opened"]["step"] >= truth.cell.at:
            yield "next", "nothing", "the fault lasts to the end"
        elif truth.is_well(truth.last_step) is False and about["opened"]["step"] >= truth.cell.at:
            yield "next", "nothing", f"the loss is {truth.level_at(truth.last_step):.4g}"


def _restart(truth: Truth, line: Line) -> Iterator[False_]:
    """Judge from which checkpoint to start again, and from where what was saved is bad."""
    verified = {
        match[1]: int(match[2])
        for record in truth.log
        if (
            match := re.match(r"checkpoint (ckpt-\d+) of step (\d+) was verified", record["reason"])
        )
        and record.get("event", 0) <= line.event
    }
    for match in re.finditer(r"from (ckpt-\d+) of step (\d+)", line.text):
        if verified.get(match[1]) != int(match[2]):
            yield "next", match[0], f"verified are {verified}"
        elif int(match[2]) >= truth.cell.at and truth.cell.kind not in ENDS:
            yield "next", match[0], f"it was saved after the fault at {truth.cell.at}"
    bad = r"(?:saved since|given from|change at|damaged in|slow from|data of|in) step (\d+)"
    for match in re.finditer(bad, line.prose):
        late = SLOWLY.get(truth.cell.kind, NEAR)
        if not any(at - NEAR <= int(match[1]) <= at + late for at in truth.cell.onsets):
            yield "onset", match[0], f"fault at {truth.cell.at}"
    if "what the model is given" in line.prose and truth.cell.kind not in INPUTS:
        yield "advice", "mend what the model is given", f"it was {truth.cell.fault}"


def refusal(words: str) -> str:
    """Return why a command line is none, "" where it parses."""
    try:
        command, context, rest = group, None, shlex.split(words)[1:]
        rest = ["run", *rest] if rest[0].startswith("-") else rest
        name = "supervise"
        while True:
            if not isinstance(command, click.Group):
                command.make_context(name, [*rest], parent=context)
                return ""
            context = click.Context(command, parent=context, info_name=name)
            found, named, rest = command.resolve_command(context, [*rest])
            if named is None:
                return f"no command {found}"
            name, command = str(found), named
    except Exception as error:  # of any kind: a person would see it, too
        return f"refused: {getattr(error, 'message', None) or error}"


def _proof(truth: Truth, line: Line, about: Mapping[str, Any]) -> Iterator[False_]:
    at = truth.cell.at
    yield from _slow_end(truth, line)
    rows = [r for r in truth.rows if r.rank == 0 and "train_loss_raw" in r.values]
    for match in BACK.finditer(line.prose):
        if re.search(r"(NOT|not) $", line.prose[: match.start()]) or not about:
            continue
        since = [r for r in rows if r.step >= at - NEAR and r.event <= line.event]
        left = [r for r in since if not r.values["train_loss_raw"] <= truth.highest]
        if not left:
            yield "proof", match[0], "the loss never left it"
            continue
        if match[1] is None and match[2] is None:
            if truth.is_well(line.step) is False:
                yield "proof", match[0], f"the loss is {truth.level_at(line.step):.4g}"
            continue
        step = int(_numbers(match, 1, 2))
        part = [r for r in rows if step <= r.step < step + GOOD_WINDOW and r.event <= line.event]
        window = {r.step: r for r in part}.values()  # the newest of a step that was made again
        bad = [r for r in window if not r.values["train_loss_raw"] <= truth.bound]
        if step < at:
            yield "proof", match[0], f"the fault is at {at}"
        elif bad and len(bad) > 1:
            value = bad[0].values["train_loss_raw"]
            yield "proof", match[0], f"{value:.4g} at step {bad[0].step}, above {truth.bound:.4g}"
    since = [r for r in rows if r.step >= at - NEAR and r.event <= line.event]
    out = [r for r in since if not r.values["train_loss_raw"] <= truth.bound]
    if STAYED in line.prose and len(out) > 1 and _is_about_fault(truth, about):
        value = f"{out[0].values['train_loss_raw']:.4g}"
        yield "proof", STAYED, f"{value} at {out[0].step}, above {truth.bound:.4g}"
    for match in re.finditer(r"norms? (as before|are up)", line.prose, re.IGNORECASE):
        pairs = [_end(truth, name) for name in ("grad_global_norm", "update_norm")]
        ratios = [now / then for now, then in pairs if now is not None and then]
        if match[1] == "as before" and any(not 0.4 < r < 2.5 for r in ratios):
            yield "proof", match[0], f"they are ×{_listed(ratios)} of undisturbed"
        if match[1].lower() == "are up" and ratios and all(r < 1.25 for r in ratios):
            yield "proof", match[0], f"they are ×{_listed(ratios)} of undisturbed"
    for match in re.finditer(r"recoverable spike|(?<!not )recovered(?: so far|: )", line.prose):
        if (
            truth.is_well(line.step) is False
            and about.get("opened", {}).get("step", 0) >= at - NEAR
        ):
            yield "proof", match[0], f"the loss is {truth.level_at(line.step):.4g} at {line.step}"


def _slow_end(truth: Truth, line: Line) -> Iterator[False_]:
    """Judge until when the steps are said to be slow."""
    rows = [v for s, v in truth.series("step_time") if s <= line.step]
    past = [v for s, v in truth.series("step_time") if s < truth.cell.at][-LAST:]
    if not past or not rows:
        return
    middle = median(past)
    now = median(rows[-LAST:]) / middle
    if "still slow: " in line.prose and now < SLOW_RATIO:
        yield "proof", "still slow", f"steps take {now:.2g} times as long"
    for match in re.finditer(r"slow until about step (\d+)", line.prose):
        until = int(match[1])
        near = [v for s, v in truth.series("step_time") if until - GOOD_WINDOW < s <= until]
        later = [v for s, v in truth.series("step_time") if until + NEAR < s <= until + LAST]
        if (
            median(near) < SLOW_RATIO * middle
            or median(later or [middle]) > 2 * SLOW_RATIO * middle
        ):
            yield "proof", match[0], f"{_listed(v / middle for v in near)} times as long"


def _end(truth: Truth, metric: str) -> tuple[float | None, float | None]:
    """Return the median of the last steps, and that of the undisturbed run."""
    now = [v for _, v in truth.series(metric)[-LAST:] if math.isfinite(v)]
    then = [v for _, v in truth.series(metric, plain=True)[-LAST:] if math.isfinite(v)]
    return median(now) if now else None, median(then) if then else None


def _cause(truth: Truth, line: Line, about: Mapping[str, Any]) -> Iterator[False_]:
    kind, text = truth.cell.kind, line.prose
    words = CAUSES.get(kind)
    if words is None:
        return
    if line.place.endswith("title") and (match := re.search(r" after (an? [^:·(]*)", text)):
        trigger = match[1].partition("  ")[0].strip()
        if not re.search(words, trigger, re.IGNORECASE):
            yield "cause", f"after {trigger}", f"it was {truth.cell.fault}"
    if "(drill)" in text and not truth.cell.is_drill:
        yield "cause", "(drill)", "no drill"
    if not line.place.endswith(" cause"):
        return
    if not truth.cell.is_drill and "drill" in text:
        yield "cause", text, "no drill"
    if truth.cell.is_drill and f"drill {kind} at step {truth.cell.at}" in text:
        return
    area = "data" if words == INPUT else "ranks" if kind == "drift" else "attention"
    for match in UNCHANGED.finditer(text):
        if area in match[1] and kind in (*DATA, "drift", "attention_bias"):
            yield "cause", match[0], f"it was {truth.cell.fault}"
    if text.startswith("a checkpoint took"):
        yield "cause", text[:60], f"it was {truth.cell.fault}"
    for match in re.finditer(r"[^,;:]*\(step (\d+)\)", text.partition("near it: ")[0]):
        if int(match[1]) < min(truth.cell.onsets) - NEAR:
            yield "onset", match[0].strip(), f"fault at {truth.cell.at}"
    if not re.search(rf"\bunknown\b|{words}", text, re.IGNORECASE):
        yield "cause", text[:160], f"it was {truth.cell.fault}"


def _crash(truth: Truth, says: Told) -> Iterator[Finding]:
    """Judge the message of an end without an incident: what ended the job, and where."""
    for sent in says.messages:
        if sent.kind != "finished" or sent.incident or truth.code == 0:
            continue
        words = CAUSES.get(truth.cell.kind, "")
        if not re.search(words, sent.text, re.IGNORECASE):
            yield Finding(END, "cause", "finished", sent.text, f"it was {truth.cell.fault}")
        if abs(sent.step - truth.cell.at) > NEAR:
            yield Finding(END, "onset", "finished", f"step {sent.step}", f"at {truth.cell.at}")


def _status(truth: Truth, about: Mapping[str, Any]) -> Iterator[False_]:
    status, cell = about["state"], truth.cell
    step = about["closed"]["step"] if about["closed"] else truth.last_step
    title = f"{about['title']} · {status}"
    rules = [rule["rule"] for rule in about["rules"]]
    is_healthy = cell.kind in HEALTHY or _is_without(truth, about)
    if is_healthy and not all(rule.startswith(TIMES) for rule in rules):
        yield "no fault", title, "nothing was wrong"
    if not _is_about_fault(truth, about):
        return
    well = truth.is_well(step)
    if status in ("RECOVERED", "CLEARED", "DONE") and well is False:
        yield "status", title, f"the loss is {truth.level_at(step):.4g} at step {step}"
    if status == "NOT RECOVERED" and well and about["rules"]:
        yield "status", title, f"the loss is {truth.level_at(step):.4g}, as before"
    proof, ended = about["proof"]["text"], status == ENDED[0] and truth.code == 0
    if ended and truth.is_as_undisturbed(step) and "none" in proof:
        yield "status", f"{title}; {proof[:60]}", "the loss was as before at the end"
    if (status == "JOB DOWN") is not (truth.code != 0 and status in (*ENDED, "JOB DOWN")):
        yield "status", title, f"the job ended with code {truth.code}"
    if status == ENDED[1] and well:
        yield "status", title, f"the loss is {truth.level_at(step):.4g}, as before"
    if (status == AGAIN) is not (cell.kind in RESUMED and status in ("RECOVERED", AGAIN)):
        yield "status", title, f"it was {cell.fault}"
    if status == "WITHDRAWN" and about["did"]["acted"]:
        yield "contradiction", title, about["did"]["text"]


def _unclear(truth: Truth, line: Line, about: Mapping[str, Any]) -> Iterator[False_]:
    if line.place.endswith("next"):
        return
    for match in WORDS.finditer(line.prose):
        if match[0] not in ("cards_job",) and not re.search(
            r"(rule|\() ?$", line.prose[: match.start()]
        ):
            yield "words", match[0], "not a word of people"


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in islice(values, 6))
