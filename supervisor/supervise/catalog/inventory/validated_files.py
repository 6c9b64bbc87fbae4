"""Which files were valid together: a policy that was loaded before needs no validation again.

Importing `jsonschema` and validating takes longer than the rest of loading, and a job waits for it.
A file in `$XDG_CACHE_HOME/supervise/valid` (default `~/.cache`) holds, per policy, the digests of
the policy, its packs and its runbooks, under the digest of the schemas and of the policy's text.
Whatever is not there is validated; a directory that cannot be used means that nothing is.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from . import shipped

MAX_POLICIES = 64  # whose digests are kept: the newest


class ValidatedFiles:
    """The files of one load; the first one that is asked for is the policy.

    Args:
        folder: see `place`; None: nothing is known and nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known: frozenset[str] = frozenset()
        self._seen: list[str] = []

    def holds(self, raw: bytes) -> bool:
        """Return whether this text was valid before, in a load of the same policy."""
        digest = hashlib.sha256(raw).hexdigest()
        if not self._seen and self._folder is not None:
            with suppress(OSError, UnicodeDecodeError):
                text = (self._folder / _name(digest)).read_text("ascii")
                self._known = frozenset(text.split())
        self._seen.append(digest)
        return digest in self._known

    def save(self) -> None:
        """Keep what was loaded without a mistake; best effort."""
        if self._folder is None or self._known.issuperset(self._seen):
            return
        path = self._folder / _name(self._seen[0])
        part = path.with_name(f"{path.name}.{os.getpid()}")
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            part.write_text("\n".join(self._seen) + "\n", "ascii")
            part.replace(path)
            kept = sorted(self._folder.iterdir(), key=lambda each: each.stat().st_mtime_ns)
            for old in kept[:-MAX_POLICIES]:
                old.unlink()


def place(env: Mapping[str, str]) -> Path | None:
    """Return the directory of this user's digests; None where there is no home directory."""
    for name, below in (("XDG_CACHE_HOME", ""), ("HOME", ".cache")):
        root = Path(env.get(name, ""))
        if root.is_absolute():
            return root / below / "supervise" / "valid"
    return None


def _name(policy: str) -> str:
    return f"{_language()}-{policy[:32]}"


@cache
def _language() -> str:
    """Return a digest of the schemas: another version of the language knows nothing of this one."""
    found = hashlib.sha256()
    for folder in ("policies", "runbooks"):
        for path in sorted(shipped.folder(folder).glob("*.schema.json")):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]
