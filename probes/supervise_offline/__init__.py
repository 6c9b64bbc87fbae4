"""Reads files that a job wrote, with the job's interpreter but in a process of its own.

The supervisor and the probe import nothing of it: each program is run by its path,
`python -I .../supervise_offline/verify.py`. Needs only torch. Python 3.9. Here is what several of
them need: torch, the manners of a process beside a job, and the index of the tokens of a training.
"""

import array
import json
import mmap
import os
import resource
import site
import sys
from bisect import bisect_left
from contextlib import suppress
from importlib import import_module
from typing import Any, Dict, Mapping, NamedTuple

MEMORY = 2 << 30  # bytes; project default
HEAD = 4096  # bytes of an index before its hashes
PLACES = 64  # of one gram that are looked at
MASK = (1 << 64) - 1


def find_torch() -> Any:
    """Import torch, if necessary from the paths that an isolated interpreter ignores.

    Raises:
        ImportError: it is nowhere.
    """
    try:
        return import_module("torch")
    except ImportError:
        extra = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path += [site.getusersitepackages(), *filter(None, extra)]
        return import_module("torch")


def renice_self(niceness: int, memory: int = MEMORY) -> None:
    """Let everybody else go first, and be killed first."""
    with suppress(OSError):
        os.nice(niceness)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))


def keep_slices(outputs: Dict[str, Any], previous: Mapping[str, Any]) -> None:
    """Keep of the evaluation before the slices that this one could not measure.

    Else one failure, as of a disk that was away, would leave the next one nothing to compare with.
    """
    ours, theirs = outputs["artefact"], previous.get("artefact") or {}
    conditions = "version", "dtype", "tokens", "window", "tokenizer"
    if outputs["windows"] and any(ours.get(key) != theirs.get(key) for key in conditions):
        return
    base = ours if outputs["windows"] else {**theirs, "harness": ours.get("harness", "")}
    outputs["artefact"] = {**base, "windows": {**ours["windows"]}}
    for name in theirs.get("windows", {}).keys() - outputs["windows"].keys():
        outputs["artefact"]["windows"][name] = theirs["windows"][name]
        for key in ("windows", "ratios"):
            if name in previous.get(key, {}):
                outputs[key][name] = previous[key][name]


class IndexedFile(NamedTuple):
    """A file of tokens in an index.

    Attributes:
        first: place of its first token, over all files. offset: bytes before it. kind: as of
            `array`.
    """

    first: int
    fd: int
    offset: int
    kind: str
    tokens: int

    def read(self, start: int, end: int) -> list[int]:
        """Return its tokens from a place over all files up to another one, as far as it has any."""
        start, end = (min(max(0, place - self.first), self.tokens) for place in (start, end))
        size = array.array(self.kind).itemsize
        data = os.pread(self.fd, (end - start) * size, self.offset + start * size)
        return array.array(self.kind, data).tolist()


class TokenIndex:
    """Where sequences of tokens are in the data of a training, by `supervise data check --index`.

    It has each `stride`th sequence of `gram` tokens, so that a copy of `gram + stride - 1` contains
    one at least: hashes in order, and places. What is found is compared with the files themselves.

    Raises:
        OSError, ValueError: it cannot be read, is no index, or a file is another one now.
    """

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            try:
                head = json.loads(file.read(HEAD).rstrip(b"\0"))
            except ValueError:
                raise ValueError(f"{path} is no index of `supervise data check`") from None
            whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self.gram, self.base, self.digest = head["gram"], head["base"], head["digest"]
        self.least = self.gram + head["stride"] - 1
        self._dropped = pow(self.base, self.gram, MASK + 1)
        end = HEAD + 8 * head["count"]
        self._hashes = whole[HEAD:end].cast("Q")
        self._places = whole[end : 2 * end - HEAD].cast("Q")
        self._files: list[IndexedFile] = []
        self.total = 0
        for name, size, mtime_ns, offset, kind, tokens in head["files"]:
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            stat = os.fstat(fd)
            if (stat.st_size, stat.st_mtime_ns) != (size, mtime_ns):
                raise ValueError(f"{name} was changed since it was indexed")
            self._files.append(IndexedFile(self.total, fd, offset, kind, tokens))
            self.total += tokens

    def token(self, place: int) -> int:
        """Return the token at a place over all files."""
        return self._file_of(place).read(place, place + 1)[0]

    def _file_of(self, place: int) -> IndexedFile:
        return next(file for file in reversed(self._files) if file.first <= place)

    def copied(self, tokens: list[int]) -> int:
        """Return how many tokens are in sequences of `least` or more that the files have, too."""
        marks, value = bytearray(len(tokens)), 0
        for end, token in enumerate(tokens):
            value = value * self.base + token + 1
            start = end + 1 - self.gram
            if start > 0:
                value -= (tokens[start - 1] + 1) * self._dropped
            value &= MASK
            if start >= 0:
                at = bisect_left(self._hashes, value)
                for number in range(at, min(at + PLACES, len(self._hashes))):
                    if self._hashes[number] != value:
                        break
                    begin, after = self._match(tokens, start, self._places[number])
                    if after - begin >= self.least:
                        marks[begin:after] = b"\1" * (after - begin)
        return sum(marks)

    def _match(self, tokens: list[int], start: int, place: int) -> tuple[int, int]:
        """Return from where to where tokens are as around a place, where those at `start` are."""
        file = self._file_of(place)
        base = max(file.first, place - start)  # place of the first that is compared
        begin = start - (place - base)
        theirs = file.read(base, place + len(tokens) - start)
        ours = tokens[begin : begin + len(theirs)]
        same = [a == b for a, b in zip(ours, theirs)]
        at = place - base
        if not all(same[at : at + self.gram]):
            return start, start
        left = at
        while left and same[left - 1]:
            left -= 1
        right = at + self.gram
        while right < len(same) and same[right]:
            right += 1
        return begin + left, begin + right
