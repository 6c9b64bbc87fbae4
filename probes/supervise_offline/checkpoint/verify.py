"""Verifies one checkpoint: sizes, hashes and contents of its files.

Three verdicts: good; bad, with reasons; and unverified, if reading it would run code from the file.
"""

import fnmatch
import hashlib
import json
import os
from typing import Any, Dict, List, Mapping

from supervise_offline.checkpoint.contents import limit_memory, open_file, report_progress

from . import formats
from .contents import Contents

PIECE = 1 << 22  # bytes
TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")
# Files that a training library writes beside the weights, and unpickles with code execution.
KNOWN = (*TORCH, ".safetensors", ".distcp", ".metadata", ".json", ".txt", ".model", ".jinja", ".md")
MAX_JSON = 64 << 20  # bytes; larger ones are vocabularies, and not looked into
SENTENCES, LENGTH = 20, 500  # of an answer: a file may have any number of names of any length
AUXILIARY = ("training_args.bin", "rng_state*", "random_states*", "scheduler.*", "*.pkl")


def verify_checkpoint(torch: Any, path: str, request: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the verdict and the contents.

    Args:
        wanted: the flags `load`, `finite` and `optimizer`.

    Returns:
        `ok`: true, false, or null for unverified. `problems` and `unread`: sentences.
        `files`: per name, relative to the directory of the checkpoint, `{"size", "sha256"}`.
        `tensors`, and their `bytes`. `step` inside, or null. `optimizer`, `rng`: whether it has
        such a state. `resumable`: see there.
    """
    contents = Contents(torch, bool(request.get("finite")))
    answer: Dict[str, Any] = {"path": path, "files": {}, "unread": []}
    try:
        names = list_files(path)
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        answer["files"] = {name: hash_file(os.path.join(folder, name)) for name in names}
        limit_memory(sum(file["size"] for file in answer["files"].values()))
        if request.get("load"):
            answer["unread"] = _read(torch, path, names, contents)
            _judge(names, request, contents, answer["unread"])
    except OSError as error:
        contents.problems.append(f"{error.filename or path}: {error.strerror or error}")
    bad = [text[:LENGTH] for text in contents.problems[:SENTENCES]]
    unread = answer["unread"] = [text[:LENGTH] for text in answer["unread"][:SENTENCES]]
    answer["ok"] = False if bad else None if unread else True
    answer["problems"] = bad
    for name in ("tensors", "bytes", "step", "optimizer", "rng"):
        answer[name] = getattr(contents, name)
    answer["resumable"] = "unknown" if unread else resumable(list(answer["files"]), contents)
    return answer


def resumable(names: List[str], contents: Contents) -> str:
    """Return whether a job can resume from a checkpoint that was read.

    Returns:
        `full`: it holds weights and an optimizer's state, and for a Trainer of transformers its
        step. `weights only`: nothing in it can be an optimizer's state. `unknown`: all others.
    """
    tensors = contents.weights or contents.other
    if contents.optimizer and tensors:
        lacks = "training_args.bin" in names and "trainer_state.json" not in names
        return "unknown" if lacks else "full"
    if contents.hints or contents.other or not contents.weights:
        return "unknown"
    alone = len(names) == 1
    return "weights only" if alone or all(name.endswith(KNOWN) for name in names) else "unknown"


def list_files(path: str) -> List[str]:
    """Return the files of a checkpoint, relative to its directory, sorted. Raises OSError."""
    if not os.path.isdir(path):
        return [os.path.basename(path)]
    paths = []
    for folder, _, names in os.walk(path):
        paths += [os.path.relpath(os.path.join(folder, name), path) for name in names]
    return sorted(paths)


def hash_file(path: str) -> Dict[str, Any]:
    """Return size and SHA-256 of a file. Raises OSError."""
    sha, size = hashlib.sha256(), 0
    with open_file(path) as file:
        while True:
            piece = file.read(PIECE)
            report_progress()
            if not piece:
                return {"size": size, "sha256": sha.hexdigest()}
            sha.update(piece)
            size += len(piece)


def _read(torch: Any, path: str, names: List[str], contents: Contents) -> List[str]:
    """Read all files; return those that cannot be read without running code."""
    unread, read = [], set()
    alone = not os.path.isdir(path)
    folder = os.path.dirname(path) if alone else path
    for metadata in (n for n in names if os.path.basename(n) == formats.METADATA):
        inside = os.path.dirname(metadata)  # OLMo-core and accelerate have it in a subdirectory
        try:
            shards = formats.read_distributed(torch, os.path.join(path, inside), contents)
            read |= {metadata, *(os.path.join(inside, shard) for shard in shards)}
        except formats.NeedsCode as error:
            unread.append(f"{metadata} is not loadable without running code: {error}")
        except formats.Damaged as error:
            contents.problems.append(str(error))
    for name in names:
        contents.named(os.path.basename(name))
        contents.hints = contents.hints or "optim" in name.lower()
        if name in read or name.endswith(".distcp"):
            continue
        try:
            _read_one(torch, os.path.join(folder, name), name, alone, contents)
        except formats.NeedsCode as error:
            if alone or not any(fnmatch.fnmatch(os.path.basename(name), p) for p in AUXILIARY):
                unread.append(f"{name} is not loadable without running code: {error}")
        except formats.Damaged as error:
            contents.problems.append(f"{name} cannot be loaded: {error}")
    return unread


def _read_one(torch: Any, path: str, name: str, alone: bool, contents: Contents) -> None:
    if name.endswith(".safetensors"):
        formats.read_safetensors(torch, path, contents)
    elif name.endswith(".json"):
        _read_json(path, name, contents)
    elif alone or name.endswith(TORCH):
        formats.read_torch(torch, path, contents, "" if alone else name)


def _read_json(path: str, name: str, contents: Contents) -> None:
    try:
        with open_file(path) as file:
            text = file.read(MAX_JSON + 1)
        if len(text) > MAX_JSON:
            return
        document = json.loads(text.decode("utf-8"))
        shards = document.get("weight_map", {}) if isinstance(document, dict) else {}
        names = sorted({str(shard) for shard in dict(shards).values()})
    except RecursionError:
        raise formats.Damaged("it is nested without end") from None
    except (ValueError, TypeError) as error:
        raise formats.Damaged(f"it is not JSON, or of another form: {error}") from None
    if not isinstance(document, dict):
        return
    if name.endswith(".index.json"):
        for shard in names:
            if not os.path.exists(os.path.join(os.path.dirname(path), shard)):
                contents.problems.append(f"the shard {shard} is missing")
    if os.path.basename(name) == "trainer_state.json" and isinstance(
        document.get("global_step"), int
    ):
        contents.step = document["global_step"]


def _judge(
    names: List[str], request: Mapping[str, Any], contents: Contents, unread: List[str]
) -> None:
    if unread or contents.problems:
        return
    if not contents.tensors:
        unread.append("it contains no tensor" if names else "it contains no file")
    elif request.get("optimizer") and not contents.optimizer:
        contents.problems.append("it contains no optimizer state")
