"""The form of a class of failures, in `policies/failures/classes.yaml` and in `job.failures`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ..schema.field_types import Doc, Pattern
from .runbook_form import Version

Id = Annotated[str, Pattern("[a-z][a-z0-9-]{0,63}", "a name of small letters, digits and -")]
Signal = Annotated[str, Pattern("SIG[A-Z0-9]+", "the name of a signal, such as SIGSEGV")]


@dataclass(frozen=True)
class FailureForm:
    """Failures that mean the same for the run: what to look for, and whether a start can help."""

    id: Annotated[Id, Doc("name of the class")]
    title: Annotated[str, Doc("what happened, in a few words")]
    match: Annotated[
        tuple[str, ...],
        Doc("regular expressions of Python; one that is found in `type: message` is enough"),
    ] = ()
    kinds: Annotated[
        tuple[Literal["exception", "signal", "exit", "thread", "launcher"], ...],
        Doc("the only kinds of ends that count; default: any"),
    ] = ()
    types: Annotated[tuple[str, ...], Doc("names of exceptions")] = ()
    signals: Annotated[tuple[Signal, ...], Doc("names of signals")] = ()
    logs: Annotated[
        tuple[str, ...],
        Doc(
            "regular expressions for lines of the files in `job.logs`, which hold more than errors"
        ),
    ] = ()
    codes: Annotated[tuple[int, ...], Doc("exit codes")] = ()
    relaunch: Annotated[
        Literal["always", "once", "never"],
        Doc("what `job.on_crash` makes of it: a start each time, one per run, or none"),
    ] = "always"
    then: Annotated[str, Doc("what people can do about it")] = ""
    secondary: Annotated[
        bool, Doc("it follows from the end of another process, which is named first")
    ] = False


@dataclass(frozen=True)
class FailuresFile:
    """policies/failures/classes.yaml: classes in the order in which they are tried."""

    version: Version
    failures: Annotated[tuple[FailureForm, ...], Doc("the first class that matches counts")]
