"""Passes over what is in quarantine, and counts it: batches of a loader, shards of a dataset's
list, and updates of steps whose batch is listed by its fingerprint.

Without an entry nothing here is called but once a step, and nothing of the job is touched. No
random number is drawn. A quarantine of everything would be a job that never steps again: then the
data is handed out all the same, and a notice reports it.

Several ranks would part if one of them passed over batches alone, so there only lists are filtered
and `is_quarantined` answers: from one step on, at whose end all ranks take it up together, or from
the launch on.

The first names that the job asks about are reported to the supervisor as those of shards, so that a
person can put them into quarantine. Those that a loader's workers ask about are not seen.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Tuple

from ..config import rank_and_world
from ..context import Refused
from ..data.quarantine import Manifest, ShardLists
from ..data.shard_tracker import Origin, name_of, short
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import Step, Update
    from .batch import BatchCollector, ShardsCollector

QUARANTINE_METRICS = ()

NAMED = 4  # shards in a notice
WAITING = 8  # notices of the time before this process is a rank
ASKED = 60  # names that the job asks about, that are reported to the supervisor
ASKS, LISTS = "asks", "lists"  # how shards are left out
PER_NOTICE, BYTES, TEXT = 6, 560, 200  # of names, as in `shards`


class QuarantineCollector(Collector):
    """Passes over what is in quarantine, and counts it: batches of a loader, shards of a dataset's
    list, and updates of steps whose batch is listed by its fingerprint.

    The quarantine of one process. Sleeps until there is one.

    Attributes:
        manifest: what is in force.
        lists: the lists of shards that were filtered.
        passed: batches that were passed over, by the short name of their shard.
    """

    METRICS = QUARANTINE_METRICS

    ASLEEP = True

    def __init__(
        self, context: ProbeContext, batch: BatchCollector, shards: ShardsCollector
    ) -> None:
        super().__init__(context)
        config = context.config
        self._position, self._reporter = context.position, context.reporter
        self._batch, self._shards = batch, shards.shards
        self.manifest = Manifest(config.quarantine, config.attempt)
        self.lists = ShardLists(self.torch, self.manifest, self.report)
        self.passed: Counter[str] = Counter()
        self._updates = 0  # dropped
        self._reported_at = 0  # of all that was passed over, when it was last reported
        self._exhausted = False  # everything is in quarantine: the loader is left alone
        self._warned = False
        self._waiting: List[Tuple[str, Dict[str, Any]]] = []
        self._announced = ""  # what was reported last of what is in force
        self._asked: Dict[str, None] = {}
        self._passed_on = 0  # of these
        self._way = ""  # how shards are left out, as this rank has promised
        if self.manifest.is_known:
            self._announce()

    # ── a loader ──────────────────────────────────────────────────────────────────────────────

    def holds(self, origins: Iterable[Origin]) -> bool:
        """Return whether a batch from there must be passed over; it is counted then."""
        if self._exhausted or not self.manifest.shards:
            return False
        quarantined = [origin.shard for origin in origins if self.manifest.holds(origin.shard)]
        if not quarantined or not self._alone(quarantined[0]):
            return False
        self.passed[short(quarantined[0])] += 1
        self.wake()
        return True

    def exhausted(self) -> None:
        """A loader has nothing else to hand out: from now on it is left alone."""
        self._exhausted = True
        self.report(
            "all that the loader hands out is in quarantine: nothing of it is passed over",
            self._data(),
        )

    def asks(self, name: Any) -> bool:
        """The job asks, in any thread, whether a shard is in quarantine."""
        if self.manifest.refresh():
            self._announce()
        if len(self._asked) < ASKED:
            shard = name_of(name)
            if shard is not None and shard not in self._asked:
                self._asked[shard] = None
                self.wake()
        return self.manifest.holds(name)

    # ── a step ────────────────────────────────────────────────────────────────────────────────

    def measure(self, update: Update) -> None:
        if not self.manifest.batches or update.skip:
            return
        fingerprint = self._batch.so_far()
        if fingerprint in self.manifest.batches:
            update.skip = "quarantine"
            self._updates += 1

    def collect(self, step: Step, values: Dict[str, Number]) -> None:
        while self._waiting:  # another thread may add to it
            message, data = self._waiting.pop(0)
            self._reporter.notice("quarantine", message, data)
        if self._passed_on < len(self._asked):
            self._pass_on()
        total = self._updates + sum(self.passed.values()) if self.passed else self._updates
        if total > self._reported_at and total >= 10 * self._reported_at:
            self._reported_at = total
            self._reporter.notice(
                "quarantine", f"passed over so far: {self._counts()}", self._data()
            )

    # ── the supervisor ────────────────────────────────────────────────────────────────────────

    def do_quarantine(self, args: Dict[str, Any]) -> Dict[str, Any]:
        """The verb `quarantine`: `{"generation", "path"}`; what is in force from now on."""
        manifest = self.manifest
        self._obtain(args)
        if manifest.batches and self._batch.on_device:
            raise Refused(
                "batches are hashed on the accelerator here, so a step is over before it is known "
                "which one it had; put shards in quarantine"
            )
        self._exhausted = self._warned = False
        self._announce()
        return {
            "held": manifest.generation,
            "shards": len(manifest.shards),
            "batches": len(manifest.batches),
        }

    def can_quarantine_now(self, args: Dict[str, Any]) -> Dict[str, Any]:
        """Return how this rank would leave shards out, `asks` or `lists`; at a fence of all ranks.

        Raises:
            Refused: it would not: batches come whole, and a rank that passes over some alone leaves
                the others waiting.
        """
        self._obtain(args)
        if self._asked or self.lists.filterable():
            self._way = ASKS if self._asked else LISTS
            return {"way": self._way}
        raise Refused(
            "this launch cannot leave a shard out: the job does not ask is_quarantined, its loader "
            "has no list of shards, and of several ranks none may pass over batches alone"
        )

    def do_quarantine_now(self, args: Dict[str, Any]) -> Dict[str, Any]:
        """The verb `quarantine_now`: what is there for the next launch is in force from here on."""
        if not self._way:  # it came without a promise: of one rank
            self.can_quarantine_now(args)
        way, self._way = self._way, ""
        self.manifest.hasten()
        self._announce()
        shards = len(self.manifest.shards)
        return {"way": way, "held": self.manifest.generation, "shards": shards}

    def _obtain(self, args: Dict[str, Any]) -> None:
        """Read the generation that is wanted. Raises Refused: it is not there."""
        manifest, generation = self.manifest, int(args["generation"])
        manifest.path = str(args["path"])
        manifest.refresh()
        if manifest.generation < generation:
            reason = manifest.error or f"{manifest.path} is generation {manifest.generation}"
            raise Refused(f"generation {generation} of the quarantine is not to be had: {reason}")

    def describe(self) -> Dict[str, Any]:
        """Return what the status says; empty where there never was a quarantine."""
        if not self.manifest.is_known:
            return {}
        trouble = self.manifest.error
        return {**self._data(), "trouble": trouble} if trouble else self._data()

    def report(self, message: str, data: Dict[str, Any]) -> None:
        """Say it at the end of the step, when there is somebody to say it to."""
        self.wake()
        if len(self._waiting) < WAITING:
            self._waiting.append((message, data))

    # ── inside ────────────────────────────────────────────────────────────────────────────────

    def _announce(self) -> None:
        """Tell what is in force, or why that is not known, once."""
        message = self.manifest.error or self._in_words()
        if message != self._announced:
            self._announced = message
            self.report(message, self._data())

    def _pass_on(self) -> None:
        """Tell the supervisor names that the job asked about, a few at a time."""
        shards = self._shards
        names = list(self._asked)[self._passed_on :][:PER_NOTICE]
        self._passed_on += len(names)
        for name in names:
            shards.number(name)
        reports = shards.take_unreported(PER_NOTICE, BYTES)
        if reports:
            text = ", ".join(reports.values())
            self._reporter.notice("shard", f"the job asks about {text}"[:TEXT], {"shards": reports})

    def _alone(self, shard: str) -> bool:
        ranks = self._position.world_size
        if self._reporter.writer is None:
            ranks = rank_and_world(dict(os.environ), self.torch)[1]
        if ranks > 1 and not self._warned:
            self._warned = True
            self.report(
                f"batches of {shard} are trained on although it is in quarantine: of {ranks} ranks "
                "none may pass over a batch alone; ask is_quarantined in the dataset",
                self._data(),
            )
        return ranks <= 1

    def _in_words(self) -> str:
        manifest = self.manifest
        names = sorted(manifest.shards)[:NAMED]
        remainder = len(manifest.shards) - len(names)
        text = ", ".join(names) + (f" and {remainder} more" if remainder > 0 else "")
        listed = f"{len(manifest.batches)} batches" if manifest.batches else ""
        content = " and ".join(filter(None, (text, listed))) or "nothing"
        if not manifest.generation:
            return f"in quarantine, by hand: {content}"
        return f"in quarantine from generation {manifest.generation} on: {content}"

    def _counts(self) -> str:
        counts = [f"{count} batches of {name}" for name, count in self.passed.most_common(NAMED)]
        counts += [f"{self._updates} updates"] if self._updates else []
        return ", ".join(counts)

    def _data(self) -> Dict[str, Any]:
        return {
            "generation": self.manifest.generation,
            "shards": len(self.manifest.shards),
            "batches": len(self.manifest.batches),
            "passed_over": sum(self.passed.values()),
            "updates_dropped": self._updates,
        }
