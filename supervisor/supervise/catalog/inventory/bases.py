"""The file that a policy extends.

Told by its text alone, so that the launch of a job need not read YAML.
"""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import InputError
from . import shipped

SUFFIX = ".yaml"
_EXTENDS = re.compile(r"^extends:[ \t]+(?:'([^'\n]+)'|\"([^\"\\\n]+)\"|([^'\"\s#]+))", re.M)


def locate(path: Path, base: str) -> Path:
    """Return the file that `extends: base` names in the policy at `path`.

    Raises:
        InputError: there is none.
    """
    from ..document.diagnostics import did_you_mean  # the launch of a job needs no hint

    named = path.parent / base
    if named.suffix == SUFFIX or len(Path(base).parts) > 1:
        if shipped.is_file(named):
            return named
        raise InputError(f"no policy {base!r}: no such file", hint="a path begins at this file")
    found = shipped.find("policies", base)
    if found is None:
        own = shipped.is_file(named.with_name(f"{base}{SUFFIX}"))
        hint = did_you_mean(base, shipped.names("policies"))
        raise InputError(
            f"no shipped policy {base!r}", hint=f"write {base}{SUFFIX}" if own else hint
        )
    return found


def chain(path: Path) -> list[Path]:
    """Return the file of a policy, the one that it extends, the one that this extends, and so on.

    It ends where a file cannot be read, or comes again.

    Raises:
        InputError: a base is not there.
        ValueError: `extends` is written so that only a YAML reader finds it.
        OSError: a file cannot be read.
    """
    found: list[Path] = []
    while path not in found:
        found.append(path)
        text = path.read_bytes().decode("utf-8", "replace")
        named = _EXTENDS.search(text)
        if named is None:
            if re.search(r"""^\s*[{"']?\s*["']?extends\b""", text, re.M):
                raise ValueError("extends is written in another style")
            break
        path = locate(path, next(filter(None, named.groups())))
    return found
