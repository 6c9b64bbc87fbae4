"""The files of one step beside each other, as one checkpoint: model_00100.pt, optim_00100.pt.

The file of the model stands for all of them. A set is complete when it has what the set of the step
before has. Reads names only.

Source of the names: nanochat, `save_checkpoint` in checkpoint_manager.py, writes the model first,
then meta_00100.json, then optim_00100_rank0.pt of each rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

MODEL, OPTIMIZER = "model", "optim"
_MEMBER = re.compile(
    r"(?P<kind>[A-Za-z]+)_(?P<step>\d{3,})(?P<rank>_rank\d+)?\.(pt|pth|bin|ckpt|safetensors|json)"
)


def model_of(path: str, matched: Collection[str]) -> str:
    """Return the model's file of the set that a file belongs to; the file itself if there is none.

    Args:
        matched: paths that patterns match; of them only one that matches as well stands for others.
    """
    found = _MEMBER.fullmatch(Path(path).name)
    if found is None or found["kind"] == MODEL:
        return path
    names = (f"{MODEL}_{found['step']}.{end}" for end in ("pt", "pth", "bin", "safetensors"))
    models = (str(Path(path).with_name(name)) for name in names)
    wanted = (m for m in models if (m in matched or path not in matched) and Path(m).is_file())
    return next(wanted, path)


def missing(path: str) -> list[str]:
    """Return the names that a set lacks, by its model's file; [] for any other file."""
    found = _MEMBER.fullmatch(Path(path).name)
    if found is None or found["kind"] != MODEL:
        return []
    sets, step = _sets(Path(path).parent), found["step"]
    before = max((each for each in sets if int(each) < int(step)), key=int, default=step)
    wanted = sets.get(before, {}).items()
    lost = (name for key, name in wanted if key not in sets.get(step, {}))
    return sorted(name.replace(f"_{before}", f"_{step}", 1) for name in lost)


def has_optimizer(path: str) -> bool | None:
    """Return whether a set has an optimizer's file, None for a file that is in no set."""
    found = _MEMBER.fullmatch(Path(path).name)
    if found is None:
        return None
    members = _sets(Path(path).parent).get(found["step"], {})
    return any(OPTIMIZER in kind.lower() for kind, _ in members)


def _sets(folder: Path) -> dict[str, dict[tuple[str, str], str]]:
    """Return step -> (kind, rank) -> name of the files in a directory."""
    sets: dict[str, dict[tuple[str, str], str]] = {}
    for each in folder.iterdir():
        if found := _MEMBER.fullmatch(each.name):
            key = found["kind"], found["rank"] or ""
            sets.setdefault(found["step"], {})[key] = each.name
    return sets
