"""The long lane: `python -m tests.fuzz.drive TARGET --seconds 600`, from the top of the checkout.

Changes sound inputs at random and writes every crash and hang to `corpus/<target>/`, which the
suite replays.
"""

from __future__ import annotations

import argparse
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


def fuzz(name: str, seconds: float, seed: int, report: Callable[[str], None]) -> dict[str, int]:
    """Fuzz one target; return `executions`, `crashes` and `hangs` (different ones)."""
    target, chance = TARGETS[name], Random(f"{name}{seed}")
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    findings: set[str] = set()
    counts = {"executions": 0, "crashes": 0, "hangs": 0}
    with tempfile.TemporaryDirectory() as made:
        home = Path(made)
        inputs = target.seeds(home) + [p.read_bytes() for p in sorted(folder.iterdir())]
        _limit_memory()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                data = target.change(chance.choice(inputs), chance)
                if chance.random() < 0.5:
                    data = target.change(data, chance)
            except (RecursionError, MemoryError):  # an input grown too odd to be changed again
                continue
            counts["executions"] += 1
            found = tried(target, home, data)
            if found is None or found in findings:
                continue
            path = folder / hashlib.sha256(data).hexdigest()[:12]
            path.write_bytes(data)
            findings.add(found)
            counts["hangs" if found.startswith("hang") else "crashes"] += 1
            report(f"{name}: {found}, {len(data)} bytes in {path.name}")
    return counts


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
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
