"""Paths of the shipped policies, packs and runbooks.

Anchored at our own `__file__`, not at `sys.path`: in an editable install a stale copy of them
may lie in site-packages, and it must never win over the checkout.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import InputError
from .diagnostics import did_you_mean

PACKAGE = Path(__file__).parents[1]


def shipped_folder(kind: str) -> Path:
    """Return the folder of shipped files: `policies`, `policies/packs` or `runbooks`."""
    packed = PACKAGE / "_shipped" / kind
    return packed if packed.is_dir() else PACKAGE.parents[1] / kind


def shipped_names(kind: str) -> list[str]:
    """Return the names (without `.yaml`) of the shipped files of a kind."""
    return sorted(path.stem for path in shipped_folder(kind).glob("*.yaml"))


def find_shipped(kind: str, name: str) -> Path | None:
    """Return the shipped file of this name, or None."""
    path = shipped_folder(kind) / f"{name}.yaml"
    return path if path.is_file() else None


def locate_policy(name_or_path: str | Path) -> Path:
    """Return the file of a policy: a path, else the name of a shipped one.

    Raises:
        InputError: there is none.
    """
    path = Path(name_or_path)
    if is_file(path):
        return path
    name = path.name.removesuffix(".yaml")
    if path.parent in (Path(), Path("policies")) and (
        shipped_path := find_shipped("policies", name)
    ):
        return shipped_path  # also beside a directory of that name
    if not str(name_or_path):
        raise InputError("the name of a policy is empty", hint="give a policy file or a name")
    if path.is_dir():
        raise InputError(f"{path}: is a directory", hint="give a policy file or a name")
    if path.parent not in (Path(), Path("policies")):
        raise InputError(f"no policy {str(name_or_path)!r}", hint="there is no such file")
    message = f"no policy {str(name_or_path)!r}" + (": no such file" if path.suffix else "")
    raise InputError(message, hint=did_you_mean(name, shipped_names("policies")))


def is_file(path: Path) -> bool:
    """Return whether a file is there. Raises InputError if the path cannot be read."""
    try:
        return path.is_file()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def display_path(path: Path) -> str:
    """Return the name under which messages know a file: relative when it lies below here."""
    try:
        relative = os.path.relpath(path)
    except ValueError:  # another drive
        return str(path)
    return str(path) if relative.startswith("..") else relative


SUFFIX = ".yaml"
_EXTENDS = re.compile(r"^extends:[ \t]+(?:'([^'\n]+)'|\"([^\"\\\n]+)\"|([^'\"\s#]+))", re.M)


def locate_base(path: Path, base: str) -> Path:
    """Return the file that `extends: base` names in the policy at `path`.

    Raises:
        InputError: there is none.
    """
    named = path.parent / base
    if named.suffix == SUFFIX or len(Path(base).parts) > 1:
        if is_file(named):
            return named
        raise InputError(f"no policy {base!r}: no such file", hint="a path begins at this file")
    shipped_path = find_shipped("policies", base)
    if shipped_path is None:
        is_beside = is_file(named.with_name(f"{base}{SUFFIX}"))
        hint = did_you_mean(base, shipped_names("policies"))
        raise InputError(
            f"no shipped policy {base!r}", hint=f"write {base}{SUFFIX}" if is_beside else hint
        )
    return shipped_path


def file_chain(path: Path) -> list[Path]:
    """Return the file of a policy, the one that it extends, the one that this extends, and so on.

    It ends where a file cannot be read, or comes again.

    Raises:
        InputError: a base is not there.
        ValueError: `extends` is written so that only a YAML reader finds it.
        OSError: a file cannot be read.
    """
    paths: list[Path] = []
    while path not in paths:
        paths.append(path)
        text = path.read_bytes().decode("utf-8", "replace")
        named = _EXTENDS.search(text)
        if named is None:
            if re.search(r"""^\s*[{"']?\s*["']?extends\b""", text, re.M):
                raise ValueError("extends is written in another style")
            break
        path = locate_base(path, next(filter(None, named.groups())))
    return paths
