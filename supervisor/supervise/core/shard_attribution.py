"""Attribution of incidents to shards: those in which more of them begin than chance allows.

One spike proves nothing against the data it came with: PaLM (arXiv:2204.02311, section 5.1) met the
batches of a spike again from another checkpoint, and they did not spike. So a shard is a suspect
only when it was there at least twice when a trouble began, and when that is too often to be chance.

Chance means: troubles begin whenever they like, those of one incident too, if they are onsets of
their own (`opening`). A trouble looks at its window, the 6 steps up to its first breach; a
shard is in a share q of all windows of the run, so of n troubles it meets a number that is binomial
(n, q). Its p-value is the upper tail at the number k it did meet, and 1 for k < 2. All shards seen
are asked at once, so p must survive Holm's step-down over all of them: of m shards, the i-th
smallest must be at most 0.01 / (m - i + 1). The chance that any healthy shard is a suspect is then
below 1 % each time that is asked, however shards depend on each other (`survivors`).

Shards that follow each other in every pass meet the same troubles. Of these one is the suspect: the
one that explains the most, and of equals the one in whose steps the loss lies highest. Another one
must be beyond chance by the troubles alone that the first does not explain. So the loss is second
evidence only: a shard of code or of another language is harder for good and not guilty.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice

from .frames import LOSS
from .model.events import Frame
from .model.verdicts import ShardAccount


def binomial_tail(hits: int, tries: int, share: float) -> float:
    """Return the chance of at least `hits` in `tries` that each hit with probability `share`.

    The sum over j >= hits of C(tries, j) share^j (1 - share)^(tries - j), term by term.
    """
    complement = 1.0 - share
    terms = (
        math.comb(tries, j) * share**j * complement ** (tries - j)
        for j in range(max(0, hits), tries + 1)
    )
    return min(1.0, math.fsum(terms))


def normal_tail(z: float) -> float:
    """Return the chance that a standard normal number is above `z`."""
    return math.erfc(z / math.sqrt(2.0)) / 2.0


def significant_shards(chances: Mapping[str, float], hypotheses: int, alpha: float) -> list[str]:
    """Return what is significant at `alpha` for all questions together, the surest first.

    The step-down of Holm (Scandinavian Journal of Statistics 6, 1979, 65-70): the i-th smallest of
    m p-values must be at most alpha / (m - i + 1), and after the first that is not, none counts.

    Args:
        chances: p-value of each question that may have an answer.
        hypotheses: how many were asked in all; those that are not in `chances` count as 1.
    """
    surviving: list[str] = []
    for order, name in enumerate(sorted(chances, key=lambda shard: (chances[shard], shard))):
        if chances[name] > alpha / max(1, hypotheses - order):
            break
        surviving.append(name)
    return surviving


BEFORE = 5  # steps before the first breach: its cause may have been fed a little earlier
WINDOW = BEFORE + 1
ALPHA = 0.01  # chance that any healthy shard of the run is blamed; the usual level
LEAST = 2  # troubles that a suspect has met
TROUBLES = 256  # newest ones that count
SHARDS = 16384  # of which counts are kept; those that came first, and were never met, give way
ROOM = 1024  # so many at once, as it takes a look at all troubles
RECENT = 2048  # steps of ranks whose shard is known when a trouble begins
SMOOTH, CLIP = 32, 8.0  # steps of the level; most that one step counts, in mean deviations

Key = tuple[int, int, int]  # rank, program of the rank, number of the shard in that program


@dataclass(slots=True)
class ShardStats:
    """How often one shard was there.

    Attributes:
        windows: in how many windows of the run it is; at most 6 for each step, fewer when its
            steps follow each other.
        attempt, step: its newest one.
        steps, high: steps without a trouble whose loss was finite, and the sum of how far their
            losses were above the level before them.
    """

    windows: int = 0
    attempt: int = -1
    step: int = 0
    steps: int = 0
    high: float = 0.0


@dataclass(slots=True)
class Level:
    """Where the loss of a rank lies, and how far it usually strays, as moving means."""

    mean: float = 0.0
    stray: float = 0.0
    steps: int = 0

    def residual(self, loss: float) -> float | None:
        """Return how far `loss` is above the level, clipped; None for the first 32 of them.

        The level follows what was clipped: one spike must not lift it for those that come after.
        """
        self.steps += 1
        far = loss - self.mean
        if self.steps > SMOOTH:
            clip = CLIP * self.stray
            far = max(-clip, min(clip, far))
        share = 1.0 / min(self.steps, SMOOTH)
        self.mean += far * share
        self.stray += (abs(far) - self.stray) * (share if self.steps > 1 else 0.0)
        return far if self.steps > SMOOTH else None


@dataclass(frozen=True, slots=True)
class Trouble:
    """One trouble: `key` is its incident and the attempt; `shards` those in its window."""

    key: tuple[str, int]
    last_step: int
    shards: frozenset[Key]


class ShardAttribution:
    """Counts, of all ranks of a run, which shards were there and which were there in trouble.

    Attributes:
        columns: of the shard and the loss, by rank; other ranks need not be fed.
    """

    def __init__(self) -> None:
        self._seen: dict[Key, ShardStats] = {}
        self._names: dict[Key, str] = {}
        # rank -> its program, see Announced, and how many there were before it
        self._lives: dict[int, tuple[tuple[int, int], int]] = {}
        self.columns: dict[int, tuple[int, int]] = {}
        self._levels: dict[int, Level] = {}
        self._recent: deque[tuple[int, int, Key | None]] = deque(maxlen=RECENT)
        self._troubles: deque[Trouble] = deque(maxlen=TROUBLES)
        self._newest = (-1, -1, -1)  # program of its rank, attempt, step
        self._steps = 0  # of the run, whatever the number of ranks
        self._calm, self._high, self._squares = 0, 0.0, 0.0  # steps, residuals, their squares
        self._forgotten = 0

    # ── what is told ──────────────────────────────────────────────────────────────────────────────

    def bind_metrics(self, rank: int, names: tuple[str, ...], program: tuple[int, int]) -> None:
        """A rank told its metrics; another program of it counts its shards from 0 again."""
        previous_program, life = self._lives.get(rank, (program, 0))
        self._lives[rank] = program, life + (program != previous_program)
        if "batch_shard" not in names:
            self.columns.pop(rank, None)
            return
        loss = names.index(LOSS) if LOSS in names else -1
        self.columns[rank] = names.index("batch_shard"), loss

    def add_names(self, rank: int | None, shards: Mapping[str, str]) -> None:
        """A notice of kind `shard` told names: `{"17": "data/00017.tar"}`."""
        life = self._life(rank or 0)
        for number, name in shards.items():
            if number.isdecimal():
                self._names[rank or 0, life, int(number)] = name

    def feed(self, frame: Frame, *, calm: bool) -> None:
        """Count the shard of a step. `calm`: no trouble is open, so its loss tells of the shard."""
        columns = self.columns.get(frame.rank)
        if columns is None:
            return
        column, loss_at = columns
        values, rank = frame.values, frame.rank
        number = values[column] if column < len(values) else None
        if number is None or not math.isfinite(number):  # no shard has such a number
            return
        life = self._life(rank)
        if (life, frame.attempt, frame.step) > self._newest:
            self._newest = life, frame.attempt, frame.step
            self._steps += 1
        loss = values[loss_at] if 0 <= loss_at < len(values) else None
        high = (
            self._add_residual(rank, loss)
            if calm and loss is not None and loss - loss == 0.0
            else None
        )
        if number < 0.0:  # several: which of them it was cannot be told
            self._recent.append((frame.attempt, frame.step, None))
            return
        key = rank, life, int(number)
        self._count(key, frame, high)
        self._recent.append((frame.attempt, frame.step, key))
        if self._troubles:
            self._late(frame, key)

    def mark_incident(
        self, incident: str, breach: int, attempt: int, *, is_new: bool = False
    ) -> None:
        """A trouble began: blame the shards of the steps from 5 before `breach` to it.

        Told again of one incident and attempt, the newer breach takes the place of the last one,
        unless it is `is_new` onset (`opening` says when).
        """
        key, troubles = (incident, attempt), self._troubles
        old = max((n for n, trouble in enumerate(troubles) if trouble.key == key), default=-1)
        if old >= 0 and not is_new:
            del troubles[old]
        rows = [
            shard
            for tried, step, shard in self._recent
            if tried == attempt and breach - BEFORE <= step <= breach
        ]
        if rows:  # else nobody says where its data came from
            shards = frozenset(shard for shard in rows if shard is not None)
            troubles.append(Trouble(key, breach, shards))

    # ── what is asked ─────────────────────────────────────────────────────────────────────────────

    @property
    def names(self) -> frozenset[str]:
        """The names of shards that were told of so far."""
        return frozenset(self._names.values())

    @property
    def shards(self) -> int:
        """How many shards were seen in all."""
        named = [self._names[key] for key in self._seen if key in self._names]
        return self._forgotten + len(self._seen) - len(named) + len(set(named))

    def suspects(self) -> tuple[str, ...]:
        """Return the names of the shards that are to blame, the one that explains most first."""
        troubles_met = {name: self._met_by(name) for name in self._candidates()}
        share = {name: self._share(name) for name in troubles_met}
        troubles = len(self._troubles)
        chances = {
            name: binomial_tail(len(troubles_met[name]), troubles, share[name])
            for name in troubles_met
        }
        candidates = significant_shards(chances, self.shards, ALPHA)
        scores = self._scores() if len(candidates) > 1 else {}
        explained: set[int] = set()
        suspects: list[str] = []
        while candidates:
            best = max(
                candidates,
                key=lambda name: (len(troubles_met[name] - explained), scores.get(name, 0.0)),
            )
            candidates.remove(best)
            new = len(troubles_met[best] - explained)
            chance = binomial_tail(new, troubles - len(explained), share[best])
            if new >= LEAST and chance <= ALPHA / self.shards:
                suspects.append(best)
                explained |= troubles_met[best]
        return tuple(suspects)

    def account(self, name: str) -> ShardAccount:
        """Return the numbers about one shard."""
        troubles_met, troubles, share = (
            len(self._met_by(name)),
            len(self._troubles),
            self._share(name),
        )
        scores = self._scores()
        ordinary = {shard: normal_tail(z) for shard, z in scores.items()}
        return ShardAccount(
            troubles_met,
            troubles,
            share=round(share, 6),
            p=binomial_tail(troubles_met, troubles, share) if troubles_met >= LEAST else 1.0,
            loss_z=scores.get(name),
            loss_stands_out=name in significant_shards(ordinary, self.shards, ALPHA),
        )

    # ── inside ────────────────────────────────────────────────────────────────────────────────────

    def _life(self, rank: int) -> int:
        return self._lives[rank][1] if rank in self._lives else 0

    def _add_residual(self, rank: int, loss: float) -> float | None:
        high = self._levels.setdefault(rank, Level()).residual(loss)
        if high is None:
            return None
        self._calm += 1
        self._high += high
        self._squares += high * high
        return high

    def _count(self, key: Key, frame: Frame, high: float | None) -> None:
        stats = self._seen.get(key)
        if stats is None:
            if len(self._seen) >= SHARDS:
                self._forget()
            stats = self._seen[key] = ShardStats()
        follows = stats.attempt == frame.attempt and stats.step <= frame.step
        stats.windows += min(WINDOW, frame.step - stats.step) if follows else WINDOW
        stats.attempt, stats.step = frame.attempt, frame.step
        if high is not None:
            stats.steps += 1
            stats.high += high

    def _forget(self) -> None:
        blamed = {key for trouble in self._troubles for key in trouble.shards}
        free = list(islice((key for key in self._seen if key not in blamed), ROOM))
        for key in free if len(free) == ROOM else list(islice(self._seen, ROOM)):
            del self._seen[key]
            self._names.pop(key, None)
            self._forgotten += 1

    def _late(self, frame: Frame, key: Key) -> None:
        """The trouble was seen on a rank that was ahead of this one."""
        newest = self._troubles[-1]
        first_step = newest.last_step - BEFORE
        if newest.key[1] == frame.attempt and first_step <= frame.step <= newest.last_step:
            self._troubles[-1] = replace(newest, shards=newest.shards | {key})

    def _candidates(self) -> list[str]:
        troubles_met = Counter(
            name
            for trouble in self._troubles
            for name in sorted({self._names[k] for k in trouble.shards if k in self._names})
        )
        return [name for name, times in troubles_met.items() if times >= LEAST]

    def _keys(self, name: str) -> set[Key]:
        return {key for key, shard_name in self._names.items() if shard_name == name}

    def _met_by(self, name: str) -> set[int]:
        """Return which of the troubles, by their place, the shard was there for."""
        keys = self._keys(name)
        return {
            n for n, trouble in enumerate(self._troubles) if not keys.isdisjoint(trouble.shards)
        }

    def _share(self, name: str) -> float:
        """Return the share of all windows that the shard is in."""
        windows = sum(self._seen[key].windows for key in self._keys(name) if key in self._seen)
        return min(1.0, windows / max(1, self._steps))

    def _scores(self) -> dict[str, float]:
        """Return z of the mean loss of each shard against all other steps."""
        steps: Counter[str] = Counter()
        high: dict[str, float] = {}
        for key, name in self._names.items():
            stats = self._seen.get(key)
            if stats is not None:
                steps[name] += stats.steps
                high[name] = high.get(name, 0.0) + stats.high
        variance = self._squares / max(1, self._calm)
        scores = {}
        for name, here in steps.items():
            other_steps = self._calm - here
            if here >= LEAST and other_steps >= LEAST and variance > 0.0:
                lead = high[name] / here - (self._high - high[name]) / other_steps
                scores[name] = lead / math.sqrt(variance * (1.0 / here + 1.0 / other_steps))
        return scores
