"""Every error this package raises on purpose; one that is defined elsewhere only refines these.

Anything else that escapes is a bug, and is allowed to crash loudly before the job is started. Once
it runs, the supervisor fails open: the bug is reported and the job goes on. In what is made for
people and decides nothing, a bug costs no more than that, see `Views`.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar

# What code raises that meets a record of a shape that no writer gives it.
MISSHAPEN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # there is no room for more
Args = ParamSpec("Args")
Made = TypeVar("Made")
_log = logging.getLogger(__name__)


class SuperviseError(Exception):
    """Base class. `str(error)` is one line with the cause; `hint` is the next thing to try."""

    exit_code = 70

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """A worker's error reaches its caller whole, whatever its class is made from."""
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[SuperviseError], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class UsageError(SuperviseError):
    """The command line asks for something that cannot work."""

    exit_code = 64


class InputError(SuperviseError):
    """A file that the user gave cannot work."""

    exit_code = 65


class PolicyError(InputError):
    """A policy, pack or runbook file is wrong.

    Attributes:
        where: `path:line:col` of the offending key or value, one-based, as editors count.
    """

    def __init__(self, message: str, *, where: str, hint: str | None = None) -> None:
        super().__init__(f"{where}: {message}", hint=hint)
        self.where = where


class SegmentError(SuperviseError):
    """A shared-memory segment is corrupt, short, foreign or of another wire version."""


class LaunchError(SuperviseError):
    """The command could not be started.

    Attributes:
        exit_code: 127 when it was not found, 126 when it is not executable (the shell's rule).
    """

    def __init__(self, message: str, *, exit_code: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


class StoreError(SuperviseError):
    """The run directory cannot be written, or holds no run."""

    exit_code = 64


def disk_full_reason(error: BaseException) -> str | None:
    """Return how the disk said that it is full, None where something else is wrong."""
    cause = error if isinstance(error, OSError) else error.__cause__
    full = isinstance(cause, OSError) and cause.errno in FULL
    return os.strerror(cause.errno or 0) if full and isinstance(cause, OSError) else None


class TamperError(StoreError):
    """The audit log was changed after it was written.

    Attributes:
        seq: 0-based number of the first bad record.
    """

    exit_code = 1

    def __init__(self, message: str, *, seq: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.seq = seq


class ActionError(SuperviseError):
    """An action did not do its job.

    Attributes:
        retryable: True if the same call may succeed later, and left nothing half-done.
        refused: True if the job would not do it, and nothing was touched.
        inconsistent: True if some ranks did it and others did not: they differ from now on.
        unfenceable: why the ranks of this job can never act at one step, "" where they can.
        no_space: True if the disk is full. job_ended: True if the job had ended by then.
    """

    def __init__(
        self,
        message: str,
        *,
        retryable: bool = False,
        refused: bool = False,
        inconsistent: bool = False,
        unfenceable: str = "",
        no_space: bool = False,
        job_ended: bool = False,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.retryable = retryable
        self.refused = refused
        self.inconsistent = inconsistent
        self.unfenceable = unfenceable
        self.no_space = no_space
        self.job_ended = job_ended


class Views:
    """Makes what people read of a run and nothing follows from; an error costs that view alone.

    Attributes:
        failed: name of each view that could not be made -> its first error.
        report: called with both, once for each.
    """

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        self.report: Callable[[str, str], None] = lambda view, error: None

    def make(
        self, view: str, call: Callable[Args, Made], *args: Args.args, **named: Args.kwargs
    ) -> Made | None:
        """Return what the call returns, None if it failed."""
        try:
            return call(*args, **named)
        except Exception as error:
            if view not in self.failed:
                self.failed[view] = named_error(error)
                _log.exception("the %s cannot be made", view)
                with suppress(Exception):  # what shows it is for people, too
                    self.report(view, self.failed[view])
            return None


def named_error(error: Exception) -> str:
    """Return an error in one line: of ours with its class, one that was foreseen as it is."""
    return str(error) if isinstance(error, SuperviseError) else f"{type(error).__name__}: {error}"


@contextmanager
def reading_recorded_data(what: str, hint: str) -> Iterator[None]:
    """Read recorded data whose shape nobody promises: what does not fit is a StoreError.

    Args:
        what: names the file, for the message.
    """
    try:
        yield
    except MISSHAPEN as error:
        text = f"{what} cannot be understood: {type(error).__name__}: {error}"
        raise StoreError(text, hint=hint) from error
