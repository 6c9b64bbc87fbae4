"""Pages that were not delivered before the end of their run, one private file each.

    SEV1-20260105T101112-<id>.json   a page, its channel, its destination and secrets; mode 0600
    delivered.log                    outcome of each page, one JSON object per line
    NAME.aside                       a file that is not a page, for a person to inspect

Rule 1: a page is claimed with `flock` on its file, which the kernel drops with the process. The
claiming process sends it, then writes the log and removes the file.
Rule 2: only page files contain addresses and secrets.
Rule 3: no symbolic link is followed, and no file of another user is read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import pwd
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ..core.model.interfaces import Message
from ..errors import StoreError

VERSION = 1
MAX_PAGES = 1000
MAX_BYTES = 10_000_000  # of all pages
MAX_PAGE_BYTES = 256_000
MAX_LOG_BYTES = 1_000_000  # then it becomes delivered.log.1
STALE_S = 3600.0  # age at which a partial file has no writer

PAIRS = {"facts", "card"}  # fields of a message
LOG = "delivered.log"
ASIDE = ".aside"
_FRESH = ".new-"
_PAGE = re.compile(r"(SEV[01])-\d{8}T\d{6}-[0-9a-f]{16}\.json")
_CAREFUL = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # does not block on a pipe
_FOREIGN = (errno.ELOOP, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENXIO)


@dataclass(frozen=True, slots=True)
class Page:
    """An undelivered message of one channel.

    Attributes:
        keys: of all messages merged into it; it is posted under the first one.
        due: time of its first delivery, UTC ISO-8601.
        to: its `notifiers.destination`. Contains secrets.
        attempts: tries so far. error: of the newest one.
    """

    channel: str
    message: Message
    keys: tuple[str, ...]
    due: str
    to: Mapping[str, Any] = field(repr=False)
    attempts: int = 0
    error: str = ""

    @property
    def name(self) -> str:
        """Name of its file, the same for the same page."""
        identity = f"{self.message.run}|{self.channel}|{self.keys[0]}"
        digest = hashlib.sha256(identity.encode("utf-8", "replace")).hexdigest()[:16]
        stamp = re.sub(r"[-:]", "", self.due[:19])
        return f"{self.message.severity}-{stamp}-{digest}.json"

    def age_s(self, wall: str) -> float:
        """Return its age in seconds at the time `wall`, UTC ISO-8601."""
        return (datetime.fromisoformat(wall) - datetime.fromisoformat(self.due)).total_seconds()

    def facts(self) -> dict[str, Any]:
        """Return its fields for logs, without the destination."""
        message = self.message
        return {
            "run": message.run,
            "channel": self.channel,
            "severity": message.severity,
            "title": message.title,
            "keys": list(self.keys),
            "due": self.due,
            "attempts": self.attempts,
        }


def spool_directory(env: Mapping[str, str]) -> Path:
    """Return the directory of this user's pages; it need not exist. Raises StoreError."""
    state = Path(env.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():  # to be ignored by the specification
        named = env.get("HOME", "")
        with suppress(KeyError):
            named = named or pwd.getpwuid(os.geteuid()).pw_dir
        home = Path(named)
        with _store_errors(f"cannot read {home}"):
            if not (home.is_absolute() and home.is_dir()):
                raise StoreError(
                    f"there is no home directory {named}".rstrip(),
                    hint="set XDG_STATE_HOME to another directory",
                )
        state = home / ".local" / "state"
    return state / "supervise" / "outbox"


class Spool:
    """The open directory; get one from `open`. Not thread-safe.

    Attributes:
        aside: name -> why this object has set the file aside.
    """

    def __init__(self, path: Path, fd: int, wall: Callable[[], str]) -> None:
        self.path = path
        self.aside: dict[str, str] = {}
        self._fd = fd
        self._wall = wall

    @classmethod
    @contextmanager
    def open(
        cls, path: Path, wall: Callable[[], str], *, make: bool = False
    ) -> Iterator[Spool | None]:
        """Open the directory, None if there is none.

        Args:
            wall: returns the time, UTC ISO-8601, for the log.
            make: create it if there is none.

        Raises:
            StoreError: it cannot be created or read, or belongs to another user.
        """
        with _store_errors(f"cannot use {path}"):
            if make:
                path.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError):
                    path.mkdir(mode=0o700)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                if make:
                    raise
                fd = -1
        if fd < 0:
            yield None
            return
        try:
            with _store_errors(f"cannot use {path}"):
                found = os.fstat(fd)
                if found.st_uid != os.geteuid():
                    raise StoreError(f"{path} belongs to user {found.st_uid}, not to you")
                if stat.S_IMODE(found.st_mode) & 0o077:
                    os.fchmod(fd, 0o700)
            yield cls(path, fd, wall)
        finally:
            os.close(fd)

    def names(self) -> list[str]:
        """Return the files of all pages: SEV0 first, then the oldest. Raises StoreError.

        Other files are set aside.
        """
        found = self._listed()
        for name in found:
            if name.startswith(_FRESH):
                self._sweep(name)
            elif not (_PAGE.fullmatch(name) or name.startswith((LOG, ".")) or _is_aside(name)):
                self._set_aside(name, "not a page of supervise")
        return [name for name in found if _PAGE.fullmatch(name)]

    def names_aside(self) -> list[str]:
        """Return the names of all files set aside so far."""
        return [name for name in self._listed() if _is_aside(name)]

    def read(self, name: str) -> Page | None:
        """Return a page without a claim, None if removed or set aside. Raises StoreError."""
        with self._opened(name, os.O_RDONLY) as fd:
            return None if fd is None else self._parsed(name, fd)

    @contextmanager
    def claim(self, name: str) -> Iterator[Page | None]:
        """Lock a page for a `with` block.

        None if another process has it, or if it was removed or set aside.

        Raises:
            StoreError: it could not be removed after sending, so it must not be sent.
        """
        with self._opened(name, os.O_RDWR) as fd:
            if fd is None:
                yield None
                return
            with _store_errors(f"cannot claim a page in {self.path}"):
                if not os.access(".", os.W_OK, dir_fd=self._fd):
                    raise OSError(errno.EACCES, "the directory is not writable")
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    fd = None
            yield None if fd is None or self._replaced(name, fd) else self._parsed(name, fd)

    def put(self, page: Page) -> None:
        """Write a page durably. Raises StoreError."""
        self._write(page, durable=True)

    def record_failure(self, page: Page, error: str) -> None:
        """Record a failed try of a claimed page if possible."""
        with suppress(StoreError):
            self._write(replace(page, attempts=page.attempts + 1, error=error), durable=False)

    def settle(self, page: Page, what: str, detail: str, by: str) -> None:
        """Log the outcome of a claimed page and remove it. Raises StoreError."""
        self._log({"what": what, **page.facts(), "detail": detail, "by": by})
        with _store_errors(f"cannot remove a page from {self.path}"), suppress(FileNotFoundError):
            os.unlink(page.name, dir_fd=self._fd)

    def trim(self, by: str, max_pages: int = MAX_PAGES, max_bytes: int = MAX_BYTES) -> int:
        """Drop the oldest SEV1, then SEV0, down to the limits; return the number.

        Raises:
            StoreError: nothing can be removed here.
        """
        sizes = {}
        for name in self.names():
            with suppress(FileNotFoundError):
                sizes[name] = os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_size
        dropped = 0
        for name in sorted(sizes, key=lambda name: (-int(name[3]), name)):
            if len(sizes) <= max_pages and sum(sizes.values()) <= max_bytes:
                break
            with self.claim(name) as page:
                if page is not None:
                    full = f"more than {max_pages} pages or {max_bytes} bytes wait"
                    self.settle(page, "dropped", full, by)
                    dropped += 1
                    del sizes[name]
        return dropped

    # ── files ─────────────────────────────────────────────────────────────────────────────────────

    def _listed(self) -> list[str]:
        with _store_errors(f"cannot read {self.path}"), os.scandir(self._fd) as found:
            return sorted(entry.name for entry in found)

    @contextmanager
    def _opened(self, name: str, flags: int) -> Iterator[int | None]:
        """Open a regular file of ours; None if it does not exist or was set aside."""
        fd = None
        try:
            fd = os.open(name, flags | _CAREFUL, dir_fd=self._fd)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno not in _FOREIGN:
                raise StoreError(f"cannot open {self.path / name}: {error.strerror}") from error
            self._set_aside(name, f"cannot be opened: {error.strerror}")
        try:
            if fd is not None and (wrong := _wrong(os.fstat(fd))):
                self._set_aside(name, wrong)
                os.close(fd)
                fd = None
            yield fd
        finally:
            if fd is not None:
                os.close(fd)

    def _replaced(self, name: str, fd: int) -> bool:
        """Whether another process has removed or rewritten the file since it was opened."""
        try:
            return (
                os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_ino != os.fstat(fd).st_ino
            )
        except FileNotFoundError:
            return True

    def _parsed(self, name: str, fd: int) -> Page | None:
        try:
            with os.fdopen(os.dup(fd), "rb") as file:
                page = _page(json.loads(file.read(MAX_PAGE_BYTES)))
            if page.name != name:
                raise ValueError("its name belongs to another page")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self._set_aside(name, f"damaged: {type(error).__name__}: {error}"[:200])
            return None
        return page

    def _write(self, page: Page, *, durable: bool) -> None:
        page = replace(page, message=replace(page.message, curve=None))
        data = json.dumps({"version": VERSION, **asdict(page)}).encode()
        if len(data) > MAX_PAGE_BYTES:
            raise StoreError(f"a page of {len(data)} bytes is too large to be kept")
        fresh = f"{_FRESH}{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFUL
        with _store_errors(f"cannot write in {self.path}"):
            fd = os.open(fresh, flags, 0o600, dir_fd=self._fd)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                    if durable:
                        file.flush()
                        os.fsync(fd)
                os.rename(fresh, page.name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
                if durable:
                    os.fsync(self._fd)
            except BaseException:
                with suppress(OSError):
                    os.unlink(fresh, dir_fd=self._fd)
                raise

    def _log(self, record: Mapping[str, Any]) -> None:
        """Append one line; a failure must not cost a page."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | _CAREFUL
        with suppress(OSError):
            fd = os.open(LOG, flags, 0o600, dir_fd=self._fd)
            try:
                line = json.dumps({"wall": self._wall(), **record})
                os.write(fd, line.encode() + b"\n")
                if os.fstat(fd).st_size > MAX_LOG_BYTES:
                    os.rename(LOG, f"{LOG}.1", src_dir_fd=self._fd, dst_dir_fd=self._fd)
            finally:
                os.close(fd)

    def _set_aside(self, name: str, why: str) -> None:
        self.aside[name] = why
        with suppress(OSError):
            os.rename(name, name + ASIDE, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self._log({"what": "set aside", "name": name, "detail": why})

    def _sweep(self, name: str) -> None:
        with suppress(OSError):
            made_s = os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mtime
            if time.time() - made_s > STALE_S:
                os.unlink(name, dir_fd=self._fd)


@contextmanager
def _store_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{what}: {error.strerror}", hint="set XDG_STATE_HOME to another directory"
        ) from error


def _is_aside(name: str) -> bool:
    return name.endswith(ASIDE)


def _wrong(found: os.stat_result) -> str:
    """Return why a file must not be read, "" if it may."""
    if not stat.S_ISREG(found.st_mode):
        return "not a regular file"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    return "too large" if found.st_size > MAX_PAGE_BYTES else ""


def _page(found: Any) -> Page:
    """Return the page in a parsed file. Raises ValueError, TypeError, KeyError."""
    if found.pop("version") != VERSION:
        raise ValueError("of another version")
    message, to = found.pop("message"), found["to"]
    message.pop("curve", None)  # always None
    for name in PAIRS & message.keys():
        message[name] = tuple((str(key), str(value)) for key, value in message[name])
    message["rules"] = tuple(map(str, message.get("rules", ())))
    known = {field.name: field.default is MISSING for field in fields(Message)}
    if not message.keys() <= known.keys() or any(
        needed and name not in message for name, needed in known.items()
    ):
        raise ValueError("not the fields of a message")
    other = {*PAIRS, "rules", "step", "incident"}
    texts = [value for name, value in message.items() if name not in other]
    texts += [found["channel"], found["due"], found["error"], *found["keys"], to["kind"]]
    if not (found["keys"] and all(isinstance(text, str) for text in texts)):
        raise ValueError("a text is missing")
    if not (isinstance(message["step"], int) and isinstance(found["attempts"], int)):
        raise ValueError("a number is missing")
    if datetime.fromisoformat(found["due"]).tzinfo is None:
        raise ValueError("when it was due is not UTC")
    found["keys"] = tuple(found["keys"])
    return Page(message=Message(**message), **found)
