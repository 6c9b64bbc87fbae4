"""The long lane: `python -m tests.fuzz.drive TARGET --seconds 600`, from the top of the checkout.

Changes sound inputs at random, keeps what gets further into the code as new inputs, and writes
every crash and hang, made as small as it goes, to `corpus/<target>/`, which the suite replays.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from supervise.errors import SuperviseError

from .targets import TARGETS, Target

CORPUS = Path(__file__).parent / "corpus"
CPU_S = 20.0  # of one input: what takes longer is a hang, on a busy machine too
FOLLOWED = 20  # one input of so many is followed line by line
MEMORY_BYTES = 1 << 30  # more than the process has when it begins
ROOT = str(Path(__file__).parents[2])


class HangError(BaseException):
    """One input took more CPU than any sound one."""


def tried(target: Target, home: Path, data: bytes) -> str | None:
    """Return what is wrong with how an input was taken, None when nothing is."""

    def late(*_: object) -> None:
        raise HangError

    signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    try:
        target.use(home, data)
    except SuperviseError as error:
        text = str(error)
        return "an error without a word" if not text.strip() or "\n" in text else None
    except HangError:
        return f"hang: {_place(sys.exc_info()[2])}"
    except Exception as error:
        return f"crash: {type(error).__name__} at {_place(error.__traceback__)}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return None


def _place(found: Any) -> str:
    """Return the deepest line of ours that an error came from: one finding per place."""
    frames = [f for f in traceback.extract_tb(found) if f.filename.startswith(ROOT)]
    ours = [f for f in frames if "/supervise" in f.filename and "/.venv/" not in f.filename]
    frame = (ours or frames or traceback.extract_tb(found))[-1]
    return f"{frame.filename.removeprefix(ROOT)}:{frame.lineno}"


def shrunk(target: Target, home: Path, data: bytes, found: str) -> bytes:
    """Return a smaller input with the same finding, after at most some hundred tries."""
    size = max(1, len(data) // 2)
    tries = 300 if found.startswith("crash") else 0
    while size and tries > 0:
        at = 0
        while at < len(data) and tries > 0:
            less = data[:at] + data[at + size :]
            tries -= 1
            if tried(target, home, less) == found:
                data = less
            else:
                at += size
        size //= 2
    return data


class Coverage:
    """Which lines of ours have been reached. Following them is slow, so not all inputs are."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()

    def reached(self, call: Callable[[], str | None]) -> tuple[str | None, bool]:
        """Return what `call` returns, and whether it reached a line that none before it did."""
        before = len(self.lines)
        sys.settrace(self._call)
        try:
            found = call()
        finally:
            sys.settrace(None)
        return found, len(self.lines) > before

    def _call(self, frame: Any, event: str, argument: Any) -> Any:
        return self._line if "/supervise" in frame.f_code.co_filename else None

    def _line(self, frame: Any, event: str, argument: Any) -> Any:
        self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


def fuzz(name: str, seconds: float, seed: int, tell: Callable[[str], None]) -> dict[str, int]:
    """Fuzz one target; return `executions`, `crashes` and `hangs` (different ones), `inputs`."""
    target, chance = TARGETS[name], Random(f"{name}{seed}")
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    findings: dict[str, Path] = {}
    counts = {"executions": 0, "crashes": 0, "hangs": 0, "inputs": 0}
    with tempfile.TemporaryDirectory() as made:
        home = Path(made)
        inputs = target.seeds(home) + [p.read_bytes() for p in sorted(folder.iterdir())]
        _limit_memory()
        coverage, end = Coverage(), time.monotonic() + seconds
        while time.monotonic() < end:
            # Late inputs got further, but the sound ones stay worth a try.
            parent = inputs[-1 - int(len(inputs) * chance.random() ** 2)]
            try:
                data = target.change(parent, chance)
            except (RecursionError, MemoryError):  # an input grown too odd to be changed again
                continue
            counts["executions"] += 1
            if counts["executions"] % FOLLOWED:
                found, further = tried(target, home, data), False
            else:
                found, further = coverage.reached(functools.partial(tried, target, home, data))
            if found is None:
                if further and len(data) < 200_000:
                    inputs.append(data)
                continue
            if found in findings:
                continue
            small = shrunk(target, home, data, found)
            path = folder / hashlib.sha256(small).hexdigest()[:12]
            path.write_bytes(small)
            findings[found] = path
            counts["hangs" if found.startswith("hang") else "crashes"] += 1
            tell(f"{name}: {found}, {len(small)} bytes in {path.name}")
        counts["inputs"] = len(inputs)
    return counts


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    """Fuzz the targets that are named, one after the other; exit 1 when anything was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="*", choices=[*TARGETS, []], help="default: all")
    parser.add_argument("--seconds", type=float, default=600.0, help="per target")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    rows = []
    for name in chosen.target or TARGETS:
        counts = fuzz(name, chosen.seconds, chosen.seed, lambda text: print(text, flush=True))
        rows.append((name, counts))
        print(f"{name:9}", *(f"{key} {value}" for key, value in counts.items()), flush=True)
    sys.exit(any(counts["crashes"] or counts["hangs"] for _, counts in rows))


if __name__ == "__main__":
    main()
