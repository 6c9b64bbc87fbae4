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

The manifest lists what this process must not train on again. The supervisor replaces it atomically,
with rising generations; this reads it when the process starts, on a command, and on each query
after the file has changed, which is how a loader's workers get it. A person may write it too, with
`kind` and `name` of each entry alone; the defaults of the other keys are those of the supervisor
(`store/quarantine_list.py`).
"""

from __future__ import annotations

import json
import os
import weakref
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, NamedTuple, Optional

from ..context import Refused, rank_and_world
from ..runtime import files
from ..shards import Origin, shard_name, shorten_name
from . import Collector

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.scalars import Number
    from ..torch_state.records import Step, Update
    from .batch import BatchCollector, ShardsCollector


class Entry(NamedTuple):
    """One entry of the file, checked: a short name, or the fingerprint of a batch."""

    kind: str
    name: Any
    since: int
    until: Optional[int]

    def applies_to_attempt(self, attempt: Optional[int]) -> bool:
        """Return whether it applies to processes of this launch; None: of the next one."""
        if attempt is None:
            return self.until is None
        return self.since <= attempt and (self.until is None or attempt < self.until)


class Manifest:
    """The entries in force in this process.

    Attributes:
        generation: of the file that was read last; 0 without a file, or for one written by hand.
        shards: short names. batches: fingerprints.
        error: why the file could not be read; the entries in force stay in force.
    """

    def __init__(self, path: Optional[str], attempt: int) -> None:
        self.path = path
        self.generation = 0
        self.shards: frozenset[str] = frozenset()
        self.batches: frozenset[int] = frozenset()
        self.error = ""
        self._attempt = attempt  # of this launch; later entries apply from the next one on
        self._hastened = 0  # the generation whose later entries apply already
        self._read: Optional[tuple[int, int, int]] = None
        self.refresh()

    @property
    def is_known(self) -> bool:
        """Whether there is, or was, any entry, or a file that cannot be read."""
        return bool(self.generation or self.shards or self.batches or self.error)

    def refresh(self) -> bool:
        """Read the file if it has changed; return whether it had."""
        if self.path is None:
            return False
        try:
            status = os.stat(self.path)
        except OSError:  # none was written yet, or it cannot be reached
            return False
        read = (status.st_mtime_ns, status.st_ino, status.st_size)
        if read == self._read:
            return False
        self._read = read
        self._load(self.path)
        return True

    def hasten(self) -> None:
        """Let what counts from the next launch on count now, in the generation that was read."""
        self._hastened = self.generation
        self._read = None
        self.refresh()

    def is_quarantined(self, name: Any) -> bool:
        """Return whether a shard of this name, in any spelling, is in quarantine."""
        if not self.shards:
            return False
        shard = shard_name(name)
        return shard is not None and shorten_name(shard) in self.shards

    def _load(self, path: str) -> None:
        try:
            document = json.loads(files.read_file(path))
            generation = int(document.get("generation", 0))
            attempt = None if 0 < generation == self._hastened else self._attempt
            entries = [e for e in map(_entry, document["entries"]) if e.applies_to_attempt(attempt)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            self.error = f"the quarantine cannot be read: {type(error).__name__}: {error}"
            return
        self.shards = frozenset(entry.name for entry in entries if entry.kind == "shard")
        self.batches = frozenset(entry.name for entry in entries if entry.kind == "batch")
        self.generation, self.error = generation, ""


def _entry(entry: Any) -> Entry:
    """Return an entry of the file; raises for one that cannot be read."""
    kind, name = entry["kind"], entry["name"]
    if not isinstance(name, (str, int)) or isinstance(name, bool) or name == "":
        raise ValueError(f"{name!r} is not a name")
    if kind == "batch":
        name = int(name)
    elif kind == "shard":
        name = shorten_name(shard_name(name) or "")
    else:
        raise ValueError(f"kind {kind!r} is neither shard nor batch")
    since, until = int(entry.get("from_attempt", 0)), entry.get("until_attempt")
    return Entry(kind, name, since, None if until is None else int(until))


NAMES = ("urls", "shardlist", "shard_list", "shards", "streams")
INSIDE = ("dataset", "source", "pipeline", "datasets")  # where wrapped datasets are kept
NAME_KEYS = ("url", "name", "path", "remote", "local")  # of an entry that is not a name itself
DATASETS_MAX = 64  # datasets within datasets
LOADERS_MAX = 4  # whose datasets are remembered


class ShardLists:
    """The lists that were filtered in this process.

    Args:
        notify: sends a notice of a message and its data.
    """

    def __init__(
        self, torch: Any, manifest: Manifest, notify: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._torch = torch
        self._manifest = manifest
        self._notify = notify
        self._changed: dict[tuple[int, str], tuple[Any, Any]] = {}  # as it was, as it is
        self._sent: list[str] = []
        self._datasets: deque[weakref.ref[Any]] = deque(maxlen=LOADERS_MAX)

    @property
    def has_lists_to_filter(self) -> bool:
        """Whether there is anything to filter or to put back."""
        return bool(self._manifest.shards or self._changed)

    def filter_before_pass(self, loader: Any) -> None:
        """A loader is about to begin a pass: filter the lists of its dataset."""
        dataset = getattr(loader, "dataset", None)
        # Persistent workers keep the list that they began with.
        if not getattr(loader, "persistent_workers", False):
            self._remember(dataset)
        if self.has_lists_to_filter:
            self.filter(dataset)

    def _remember(self, dataset: Any) -> None:
        if any(reference() is dataset for reference in self._datasets):
            return
        try:
            self._datasets.append(weakref.ref(dataset))
        except TypeError:  # it has no place for a weak reference
            pass

    def can_filter_next_pass(self) -> bool:
        """Whether the next pass of a loader of late would go by a list from which names can go."""
        return any(
            type(owner.__dict__.get(name)) in (list, tuple) and not self._by_index(owner)
            for reference in self._datasets
            for owner in _within(reference())
            for name in NAMES
        )

    def filter(self, dataset: Any) -> None:
        """Filter the lists of `dataset`, of which a loader is about to begin a pass."""
        for owner in _within(dataset):
            for name in NAMES:
                value = owner.__dict__.get(name)
                if type(value) in (list, tuple):
                    self._filter(owner, name, value)

    def _filter(self, owner: Any, name: str, value: Any) -> None:
        key = id(owner), name
        was, now = self._changed.get(key, (value, value))
        if value is not now:  # the job replaced the list
            was = value
        allowed = [entry for entry in was if not self._manifest.is_quarantined(_name(entry))]
        self._changed.pop(key, None)
        new = was
        if len(allowed) < len(was):
            label = f"{name} of {type(owner).__name__}"
            if not allowed:
                self._notify_once(f"all of {label} is in quarantine: nothing is removed")
            elif self._by_index(owner):
                self._notify_once(f"{label} is read by index, so nothing can be removed from it")
            else:
                new = type(was)(allowed)
                self._changed[key] = was, new
                self._notify_once(f"{len(was) - len(allowed)} of {len(was)} {label} are removed")
        if new is not value:
            owner.__dict__[name] = new

    def _by_index(self, owner: Any) -> bool:
        get = getattr(type(owner), "__getitem__", None)
        return get is not None and get is not self._torch.utils.data.Dataset.__getitem__

    def _notify_once(self, message: str) -> None:
        if message not in self._sent:
            self._sent = [*self._sent[1 - DATASETS_MAX :], message]
            self._notify(message, {"generation": self._manifest.generation})


def _within(dataset: Any) -> Iterator[Any]:
    """Yield `dataset` and the datasets that it wraps, each once."""
    todo: list[Any] = [dataset]
    visited: set[int] = set()
    while todo and len(visited) < DATASETS_MAX:
        owner = todo.pop(0)
        if id(owner) in visited or not isinstance(getattr(owner, "__dict__", None), dict):
            continue
        visited.add(id(owner))
        yield owner
        for name in INSIDE:
            inner = owner.__dict__.get(name)
            todo += inner if type(inner) in (list, tuple) else [inner]


def _name(entry: Any) -> Any:
    """Return the name of an entry: itself, or the value of one of its keys or attributes."""
    if isinstance(entry, (str, bytes, os.PathLike)):
        return entry
    attributes = entry if isinstance(entry, dict) else getattr(entry, "__dict__", {})
    return next((attributes[key] for key in NAME_KEYS if attributes.get(key)), None)


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
        self._waiting: list[tuple[str, dict[str, Any]]] = []
        self._announced = ""  # what was reported last of what is in force
        self._asked: dict[str, None] = {}
        self._passed_on = 0  # of these
        self._way = ""  # how shards are left out, as this rank has promised
        if self.manifest.is_known:
            self._announce()

    # ── a loader ──────────────────────────────────────────────────────────────────────────────

    def must_skip_batch(self, origins: Iterable[Origin]) -> bool:
        """Return whether a batch from there must be passed over; it is counted then."""
        if self._exhausted or not self.manifest.shards:
            return False
        quarantined = [
            origin.shard for origin in origins if self.manifest.is_quarantined(origin.shard)
        ]
        if not quarantined or not self._alone(quarantined[0]):
            return False
        self.passed[shorten_name(quarantined[0])] += 1
        self.wake()
        return True

    def disable_skipping(self) -> None:
        """A loader has nothing else to hand out: from now on it is left alone."""
        self._exhausted = True
        self.report(
            "all that the loader hands out is in quarantine: nothing of it is passed over",
            self._data(),
        )

    def is_quarantined(self, name: Any) -> bool:
        """Whether a shard is in quarantine; the job asks, in any thread."""
        if self.manifest.refresh():
            self._announce()
        if len(self._asked) < ASKED:
            shard = shard_name(name)
            if shard is not None and shard not in self._asked:
                self._asked[shard] = None
                self.wake()
        return self.manifest.is_quarantined(name)

    # ── a step ────────────────────────────────────────────────────────────────────────────────

    def measure(self, update: Update) -> None:
        if not self.manifest.batches or update.skip:
            return
        fingerprint = self._batch.step_fingerprint()
        if fingerprint in self.manifest.batches:
            update.skip = "quarantine"
            self._updates += 1

    def collect(self, step: Step, values: dict[str, Number]) -> None:
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

    def do_quarantine(self, args: dict[str, Any]) -> dict[str, Any]:
        """The verb `quarantine`: `{"generation", "path"}`; what is in force from now on."""
        manifest = self.manifest
        self._ensure_generation(args)
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

    def can_quarantine_now(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return how this rank would leave shards out, `asks` or `lists`; at a fence of all ranks.

        Raises:
            Refused: it would not: batches come whole, and a rank that passes over some alone leaves
                the others waiting.
        """
        self._ensure_generation(args)
        if self._asked or self.lists.can_filter_next_pass():
            self._way = ASKS if self._asked else LISTS
            return {"way": self._way}
        raise Refused(
            "this launch cannot leave a shard out: the job does not ask is_quarantined, its loader "
            "has no list of shards, and of several ranks none may pass over batches alone"
        )

    def do_quarantine_now(self, args: dict[str, Any]) -> dict[str, Any]:
        """The verb `quarantine_now`: what is there for the next launch is in force from here on."""
        if not self._way:  # it came without a promise: of one rank
            self.can_quarantine_now(args)
        way, self._way = self._way, ""
        self.manifest.hasten()
        self._announce()
        shards = len(self.manifest.shards)
        return {"way": way, "held": self.manifest.generation, "shards": shards}

    def _ensure_generation(self, args: dict[str, Any]) -> None:
        """Read the generation that is wanted. Raises Refused: it is not there."""
        manifest, generation = self.manifest, int(args["generation"])
        manifest.path = str(args["path"])
        manifest.refresh()
        if manifest.generation < generation:
            reason = manifest.error or f"{manifest.path} is generation {manifest.generation}"
            raise Refused(f"generation {generation} of the quarantine is not to be had: {reason}")

    def describe(self) -> dict[str, Any]:
        """Return what the status says; empty where there never was a quarantine."""
        if not self.manifest.is_known:
            return {}
        trouble = self.manifest.error
        return {**self._data(), "trouble": trouble} if trouble else self._data()

    def report(self, message: str, data: dict[str, Any]) -> None:
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

    def _data(self) -> dict[str, Any]:
        return {
            "generation": self.manifest.generation,
            "shards": len(self.manifest.shards),
            "batches": len(self.manifest.batches),
            "passed_over": sum(self.passed.values()),
            "updates_dropped": self._updates,
        }
