"""Hears the job save a checkpoint, whatever it saves it with: torch, DCP or safetensors.

While anything is saved the phase is "checkpoint"; the supervisor is told of what holds the model's
weights. Most calls of `torch.save` do not: they write a scheduler, a cache, one tensor of a shard.

A name that the job gives to the file afterwards is not seen here: what is told of the file leads
the supervisor to it.

Source: torch.save, torch.distributed.checkpoint.save, safetensors.torch.save_file and save_model.
"""

from __future__ import annotations

import functools
import os
import sys
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Set, Tuple

from ..runtime.warning_stacklevel import uncounted

if TYPE_CHECKING:
    from ..probe import Probe
    from ..runtime.guard import Part

ENOUGH = 0.5  # of the trained parameters' elements make a checkpoint; project default
LOOKS = 100_000  # objects that are looked at before a file is none
DEPTH = 6  # of dicts in dicts
PART = "saves"
TOLD = 64  # paths that are remembered
OPTIMIZER = {"state", "param_groups"}  # the keys of an optimizer's state

What = Callable[..., Tuple[Any, Any]]


def install(torch: Any, probe: Probe) -> None:
    """Stand around `torch.save`. To be called once."""
    torch.save = around(probe, torch.save, "torch.save", lambda obj, f, *_, **__: (obj, f))


def listen(probe: Probe, module: Any) -> None:
    """Stand around the functions of a module that saves, right after its import, if it has them."""
    probe.guard.run(probe.guard.part(PART), _listen, probe, module)


def _listen(probe: Probe, module: Any) -> None:
    if module.__name__ == "safetensors.torch":
        file, model = module.save_file, module.save_model
        module.save_file = around(probe, file, "safetensors", _first_two)
        module.save_model = around(probe, model, "safetensors", _first_two)
    else:
        module.save = around(probe, module.save, "distributed checkpoint", _distributed)


def _first_two(what: Any = None, filename: Any = None, *args: Any, **kwargs: Any) -> Any:
    return kwargs.get("tensors", kwargs.get("model", what)), filename


def _distributed(
    state_dict: Any, *args: Any, checkpoint_id: Any = None, storage_writer: Any = None, **_: Any
) -> Tuple[Any, Any]:
    if checkpoint_id is None:
        checkpoint_id = getattr(storage_writer, "path", None)
    return state_dict, checkpoint_id


def around(probe: Probe, original: Callable[..., Any], how: str, what: What) -> Callable[..., Any]:
    """Return a function that saves in the phase "checkpoint", and tells of a checkpoint.

    Args:
        what: given the same arguments, returns the object that is saved, and where.
    """

    told: Dict[str, Tuple[int, int]] = {}

    def saved(seconds: float, args: Any, kwargs: Any) -> None:
        thing, place = what(*args, **kwargs)
        path = name_of(place)
        if path and how == "torch.save":
            probe.on_demand.saw(thing, path)
        if path and holds_the_model(probe, thing):
            tell(probe, told, path, seconds, how, place)
            probe.drills.saved(path)

    return in_phase(probe, original, probe.guard.part(PART), saved)


def in_phase(
    probe: Probe, original: Callable[..., Any], part: Part, saved: Callable[..., None]
) -> Callable[..., Any]:
    """Return `original` in the phase "checkpoint"; a save inside another one is part of that.

    Args:
        saved: given its seconds, its arguments and its keyword arguments once it has returned;
            runs as `part`.
    """

    @functools.wraps(original)
    @uncounted
    def save(*args: Any, **kwargs: Any) -> Any:
        library = probe.collectors["library"]
        if library.saving or probe.off_duty():
            return original(*args, **kwargs)
        library.saving = True
        probe.beat("checkpoint")
        began = monotonic_ns()
        try:
            result = original(*args, **kwargs)
            if probe.writer is not None:
                seconds = (monotonic_ns() - began) / 1e9
                probe.guard.run(part, saved, seconds, args, kwargs)
            return result
        finally:
            library.saving = False
            probe.beat("step")

    return save


def tell(
    probe: Probe,
    told: Dict[str, Tuple[int, int]],
    path: str,
    seconds: float,
    how: str,
    place: Any,
) -> None:
    """Tell of a checkpoint, once per path and step, and let its time join the next frame."""
    boundary = probe.boundary
    if boundary.handmade.pending:
        boundary.handmade.sign()
    probe.collectors["library"].saved(seconds)
    at = (boundary.attempt, boundary.number)
    if told.get(path) == at:
        return
    while len(told) >= TOLD:
        del told[next(iter(told))]
    told[path] = at
    data = {
        "path": path,
        "step": boundary.number,
        "file": stamp_of(place, path),
        **about(probe, seconds, how),
        **probe.rollbacks.probe_batch.of_save(),
    }
    probe.notice("checkpoint-saved", f"step {boundary.number} was saved by {how}", data)


def about(probe: Probe, seconds: float, how: str) -> Dict[str, Any]:
    """Return what the supervisor wants to know of any save: see `Guard.saved`."""
    return {
        "attempt": probe.boundary.attempt,
        "seconds": round(seconds, 3),
        "how": how,
        "ranks": probe.world_size,
        "python": sys.executable,
    }


def name_of(place: Any) -> str:
    """Return the absolute path of a path or of an open file with a name, else ""."""
    if not isinstance(place, (str, os.PathLike)):
        place = getattr(place, "name", None)
    if isinstance(place, os.PathLike):
        place = os.fspath(place)
    if not isinstance(place, str) or "://" in place:
        return ""
    return os.path.abspath(place)


def stamp_of(place: Any, path: str) -> Optional[Dict[str, int]]:
    """Return what a renaming keeps of what was written, None where nobody can tell.

    Device and inode, size in bytes, and time of writing by the clock of its file system.
    """
    try:
        number = place.fileno() if hasattr(place, "fileno") else path
        found = os.stat(number)
    except (OSError, ValueError):
        return None
    device, inode = found.st_dev, found.st_ino
    return {
        "device": device, "inode": inode, "size": found.st_size, "mtime_ns": found.st_mtime_ns
    }  # fmt: skip


def holds_the_model(probe: Probe, saved: Any) -> bool:
    """Whether tensors shaped as the trained parameters make up half of their elements.

    An optimizer's state is shaped alike, and is left out. Nothing is read or copied.
    """
    torch = probe.torch
    shapes, elements = _trained(probe)
    flat = all(len(shape) < 2 for shape in shapes)  # sharded as one vector: any shape may come
    found, looks = 0, 0
    todo: List[Tuple[Any, int]] = [(saved, 0)]
    while todo and elements and looks < LOOKS:
        thing, depth = todo.pop()
        looks += 1
        kind = type(thing)
        if issubclass(kind, torch.Tensor):
            if thing.is_floating_point() and (flat or tuple(thing.shape) in shapes):
                found += thing.numel()
        elif issubclass(kind, torch.nn.Module):
            found += sum(p.numel() for p in thing.parameters())
        elif issubclass(kind, dict) and depth < DEPTH and not set(dict.keys(thing)) >= OPTIMIZER:
            todo += [(value, depth + 1) for value in dict.values(thing)]
        if found >= ENOUGH * elements:
            return True
    return False


def _trained(probe: Probe) -> Tuple[Set[Tuple[int, ...]], int]:
    """Return the shapes of the trained parameters, and how many elements they have."""
    groups = (g for o in probe.boundary.optimizers() for g in o.param_groups)
    parameters = {id(p): p for group in groups for p in group["params"]}
    if not parameters:
        modules = probe.registry.modules
        parameters = {id(p): p for m in modules for p in m.parameters(recurse=False)}
    shapes = set()
    for parameter in parameters.values():
        shapes.add(tuple(parameter.shape))
        local = getattr(parameter, "_local_tensor", None)
        if local is not None:
            shapes.add(tuple(local.shape))
    return shapes, sum(p.numel() for p in parameters.values())
