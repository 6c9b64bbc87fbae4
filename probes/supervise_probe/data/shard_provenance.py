"""The shard of a batch, from a loader, its dataset or the batch itself.

Reads plain dicts, their keys and instance attributes only; a property or `__getattr__` of the job
is never run, and nothing on an accelerator is read.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple, Union
from zlib import crc32

Offset = Union[int, str, None]

SHARD_KEYS = ("__shard__", "shard", "shard_id", "__url__")  # in a batch; the first one counts
OFFSET_KEYS = ("offset", "index", "__key__")
DATASET_SHARDS = ("current_shard", "shard_name")  # of a dataset that is read in this process
DATASET_OFFSETS = ("current_offset", "shard_offset")
WRAPPERS = 4  # datasets within datasets that are looked into
LONGEST_NAME = 200
SHORT = 90  # characters of a name in notices and in the quarantine manifest
SEVERAL = 16  # origins kept of one batch
VALUES = 4096  # samples of a batch whose shard is read


class Origin(NamedTuple):
    """One shard, and where in it the batch begins."""

    shard: str
    offset: Offset = None


def name_of(value: Any) -> Optional[str]:
    """Return the name of a shard; None for any other value.

    A URL loses its query and its user, which may be secrets. The end of a long name is kept: it
    tells shards apart.
    """
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    elif isinstance(value, os.PathLike):
        value = str(os.fspath(value))
    if isinstance(value, int) and not isinstance(value, bool):
        value = f"shard {value}"
    if not isinstance(value, str) or not value:
        return None
    head, mark, tail = value.partition("://")
    if mark:
        host, slash, path = tail.partition("?")[0].partition("/")
        value = f"{head}://{host.rpartition('@')[2]}{slash}{path}"
    text: str = " ".join(value.split())
    return text if len(text) <= LONGEST_NAME else "…" + text[1 - LONGEST_NAME :]


def short(name: str) -> str:
    """Return a name that fits into a notice: a long one as a hash of all of it and its end."""
    if len(name) <= SHORT:
        return name
    return f"…{crc32(name.encode('utf-8', 'replace')):08x}…{name[10 - SHORT :]}"


def offset_of(value: Any) -> Offset:
    """Return a place in a shard: a whole number, or the key of a sample."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        return int(value) if value.isdecimal() and len(value) < 16 else value[:LONGEST_NAME]
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__.startswith(("int", "uint")):
        return int(value)
    return None


def of_batch(torch: Any, batch: Any) -> List[Origin]:
    """Return the origins that a batch names by its keys, without repeats."""
    if not isinstance(batch, dict):
        batch = getattr(batch, "__dict__", {}).get("data")  # transformers.BatchEncoding
        if not isinstance(batch, dict):
            return []
    shards = _first(torch, batch, SHARD_KEYS)
    if not shards:
        return []
    offsets = _first(torch, batch, OFFSET_KEYS)
    found: Dict[str, Origin] = {}
    for place, value in enumerate(shards):
        name = name_of(value)
        if name is not None and name not in found and len(found) < SEVERAL:
            found[name] = Origin(name, offset_of(offsets[place]) if place < len(offsets) else None)
    return list(found.values())


def _first(torch: Any, batch: Dict[Any, Any], keys: Tuple[str, ...]) -> List[Any]:
    """Return the values of the first of `keys` that is there, one per sample."""
    for key in keys:
        value = dict.get(batch, key)
        if value is None:
            continue
        if type(value) in (list, tuple):
            return list(value[:VALUES])
        if not isinstance(value, torch.Tensor):
            return [value]
        if value.device.type == "cpu" and not value.is_floating_point():
            return list(value.reshape(-1)[:VALUES].tolist())
    return []


def of_dataset(iterator: Any) -> List[Origin]:
    """Return where the dataset of a loader without workers stands."""
    own = getattr(iterator, "__dict__", {})
    if own.get("_num_workers") != 0:
        return []
    for attributes in _attributes(own.get("_dataset")):
        for key in DATASET_SHARDS:
            name = name_of(attributes.get(key))
            if name is not None:
                places = (offset_of(attributes.get(key)) for key in DATASET_OFFSETS)
                return [Origin(name, next((p for p in places if p is not None), None))]
    return []


def _attributes(dataset: Any) -> Iterator[Dict[str, Any]]:
    for _ in range(WRAPPERS):
        attributes = getattr(dataset, "__dict__", None)
        if not isinstance(attributes, dict):
            return
        yield attributes
        dataset = attributes.get("dataset")
