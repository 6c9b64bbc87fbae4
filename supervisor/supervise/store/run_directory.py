"""The run directory and its files.

    audit.log      decisions and actions, hash-chained          journal/      every event
    policy.yaml    the first policy as resolved                 policies/     those of reloads
    probe.json     configuration of the probe                   probe/        the probe's marks
    incidents/     evidence, one directory per incident         state.json    current status
    control/       commands of operators                        run.json      command, policy, host
    launch.json    newest process of the job                    relaunch/     stages of relaunches
    supervisor.log  errors of our own, as JSON lines
    quarantine.json  excluded data, if any   identity.json  what the newest launch consists of

What may hold secrets of the job, its environment and its command as given, lies beside the run, in
`.<name>.secrets`, and goes with the run's end: all that is in the run can be shared.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import DecodeError, Struct, field
from msgspec.structs import replace

from .. import __version__
from ..core.model.decisions import plain_json
from ..core.model.payload import DrillOrder, Payload
from ..core.model.policy import Policy
from ..core.model.redaction import Redactor
from ..errors import StoreError, reading_recorded_data
from . import files

RUNS = Path("runs")
COMMAND = "command.json"
IDENTITY = "identity.json"  # what the newest launch consists of; the audit log has it too
# Of a run directory with all its files. A release raises it that writes what the one before cannot
# read, and with OLDEST_FORMAT gives up what it cannot read itself: see docs/release.md.
FORMAT = OLDEST_FORMAT = 1
_VERSION = re.compile(r"[0-9][\w.+!-]{0,40}")
_RUN_ID = re.compile(r"[\w-][\w.-]{0,99}", re.ASCII)  # it names directories that gc removes


def is_run(path: Path) -> bool:
    """Return whether a path is the directory of a run. Raises StoreError if unreadable."""
    try:
        return (path / "run.json").is_file()
    except OSError as error:
        raise StoreError(f"cannot read {path / 'run.json'}: {error.strerror}") from error


class Endpoint(Struct, frozen=True):
    """Address at which the metrics of a run are served."""

    port: int
    host: str
    per_rank: bool = False


class RunDescription(Struct, frozen=True, kw_only=True):
    """What run.json says of a run and its start.

    Attributes:
        format: of the run directory, see FORMAT; of a run without one it is 1.
        argv: without secrets. supervise, python: versions.
        tier_reason: why the probe was not active.
        reload: file and mode of a reload that names none. notify: channels that were added.
        metrics: where they are served; None: nowhere.
    """

    format: int = 1
    run: str = ""
    created: str = ""
    argv: Sequence[str] = ()
    cwd: str = ""
    policy: str = ""
    policy_digest: str = ""
    mode: str = ""
    host: str = ""
    supervise: str = ""
    python: str = ""
    tier: str = ""
    tier_reason: str | None = None
    drills: Sequence[DrillOrder] = ()
    reload: tuple[str, str | None] = ("", None)
    notify: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    watch_policy: bool = False
    logs: bool = False
    metrics: Endpoint | None = None


class RunDir:
    """The directory of one run; get one from `create` or `open`."""

    def __init__(self, path: Path, run_id: str, created: Sequence[Path] = ()) -> None:
        self.path = path
        self.id = run_id
        self._created = created  # new directories, outermost first

    @classmethod
    def create(
        cls,
        path: Path | None,
        *,
        argv: Sequence[str],
        policy: Policy,
        wall: str,
        start: RunDescription | None = None,
        redactor: Redactor | None = None,
    ) -> RunDir:
        """Create the directory of a new run; its absolute path is in `path`.

        Args:
            path: None for `./runs/<utc>-<id>`; else an empty or new directory.
            argv: the job's command; only the secrets beside the run have it unredacted.
            wall: UTC now, ISO-8601; names the run.
            start: how it is started; the rest of run.json is filled in.
            redactor: for the secrets in run.json.

        Raises:
            StoreError: it cannot be created, or is not empty.
        """
        stamp = wall[:19].replace("-", "").replace(":", "").replace("T", "-")
        clean = redactor or Redactor(argv=argv)
        run_id = f"{stamp}-{secrets.token_hex(3)}"
        path = (RUNS / run_id if path is None else path).absolute()
        created = [p for p in (*reversed(path.parents), path) if not p.exists()]
        try:
            _refuse_unfit(path)
            files.make_directory(path)
            files.remember_directory(path)
            run = cls(path, run_id, created)
            for directory in (run.journal_path, run.marks_path, run.incidents_path):
                files.make_directory(directory, exist_ok=False)
            files.replace_file(path / "policy.yaml", policy.resolved.encode(), durable=False)
            start = Payload(clean.tree(plain_json(start or RunDescription()))).parse(RunDescription)
            described = replace(
                start,
                format=FORMAT,
                run=run_id,
                created=wall,
                argv=clean.command(argv),
                cwd=str(Path.cwd()),
                policy=policy.name,
                policy_digest=policy.digest,
                mode=policy.mode,
                host=socket.gethostname(),
                supervise=__version__,
                python=sys.version.split()[0],
            )
            run._make_secrets_directory()
            run.write_secret(COMMAND, list(argv))
            run.write_json("run.json", plain_json(described))
        except OSError as error:
            raise StoreError(
                f"cannot create the run directory {path}: {error.strerror}",
                hint="choose a writable directory with --run-dir DIR",
            ) from error
        return run

    @property
    def output_path(self) -> Path:
        """The file that keeps what the job prints, if that is wanted."""
        return self.path / "output" / "output.log"

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Open the directory of a run.

        Raises:
            StoreError: it is not one, and the hint names a run nearby; or it is of a format that
                this version does not read, and the hint says which version does.
        """
        try:
            described = files.read_json(path / "run.json")
            if not _RUN_ID.fullmatch(described["run"]):
                raise ValueError("run")
            _refuse_format(path, described.get("format", 1), str(described.get("supervise")))
            return cls(path.absolute(), described["run"])
        except (FileNotFoundError, NotADirectoryError):
            problem = "is not a run (no run.json)" if path.is_dir() else "is not a directory"
            raise StoreError(f"{path} {problem}", hint=_near(path)) from None
        except OSError as error:
            raise StoreError(f"cannot read {path / 'run.json'}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError):
            raise StoreError(
                f"{path / 'run.json'} does not describe a run",
                hint="restore it from a copy of the run directory",
            ) from None

    @classmethod
    def open_own(cls, path: Path) -> RunDir:
        """Open the directory of a run to act on what its files say.

        Raises:
            StoreError: it is no run, or others than the caller may have written it.
        """
        run = cls.open(path)
        try:
            reason, hint = files.find_foreign_writer(run.path)
            if not reason and run.secrets_path.exists():
                reason, hint = files.find_foreign_writer(run.secrets_path)
        except OSError as error:
            raise StoreError(f"cannot read {run.path}: {error.strerror}") from error
        if reason:
            raise StoreError(f"{reason}: what {run.path} says is not acted on", hint=hint)
        files.remember_directory(run.path)
        return run

    @property
    def audit_path(self) -> Path:
        """The audit log."""
        return self.path / "audit.log"

    @property
    def journal_path(self) -> Path:
        """Directory of the journal's segments."""
        return self.path / "journal"

    @property
    def incidents_path(self) -> Path:
        """Directory of evidence, one directory per incident."""
        return self.path / "incidents"

    @property
    def marks_path(self) -> Path:
        """Directory of the probe's marks."""
        return self.path / "probe"

    @property
    def probe_config_path(self) -> Path:
        """The configuration of the probe."""
        return self.path / "probe.json"

    @property
    def quarantine_path(self) -> Path:
        """The data that the job must not train on again."""
        return self.path / "quarantine.json"

    @property
    def policy_path(self) -> Path:
        """The policy as resolved at the start of the run."""
        return self.path / "policy.yaml"

    @property
    def secrets_path(self) -> Path:
        """The directory of what a later supervisor needs, and nobody else may read.

        In the run only where it could not be made beside it.
        """
        inside = self.path / "secrets"
        return inside if inside.is_dir() else self.path.with_name(f".{self.path.name}.secrets")

    def _make_secrets_directory(self) -> None:
        """Make it where `chmod -R` on the run does not reach it. Raises OSError."""
        same_disk = self.path.parent.stat().st_dev == self.path.stat().st_dev
        try:
            if not same_disk:  # a volume of its own, which may be all that outlives a container
                raise OSError
            files.make_directory(self.secrets_path)
        except OSError:
            files.make_directory(self.path / "secrets")

    def write_secret(self, name: str, obj: Any) -> None:
        """Write a file of `secrets_path`. Raises StoreError."""
        self.write_json(str(self.secrets_path / name), obj)

    def read_secret(self, name: str) -> Any:
        """Return the content of a file of `secrets_path`. Raises StoreError."""
        return self.read_json(str(self.secrets_path / name))

    def remove_secrets(self) -> None:
        """The run has ended: nobody takes it over."""
        files.remove_tree(self.secrets_path)

    def command(self) -> list[str]:
        """Return the job's command as given, with secrets. Raises StoreError."""
        return [str(argument) for argument in self.read_secret(COMMAND)]

    def make_durable(self) -> None:
        """Let the run survive a power cut from here on, as far as the disk does it.

        Not before the job is started: the job would wait for each file, and ends with the power.
        """
        folders = (self.journal_path, self.secrets_path, self.marks_path, self.incidents_path)
        for path in (path for folder in (self.path, *folders[:2]) for path in folder.glob("*")):
            with suppress(OSError):
                if path.is_file() and not path.is_symlink():
                    fd = files.open_file(path)
                    try:
                        files.sync_file(fd)
                    finally:
                        os.close(fd)
        for folder in (*folders, self.path, self.path.parent, *self._created):
            with suppress(OSError):
                files.sync_directory(folder)

    def discard(self) -> None:
        """Remove the run of a job that could not be started; an existing directory is kept."""
        with suppress(OSError):
            for child in self.path.iterdir():
                files.refuse_exchanged(child)
                if child.is_dir():
                    files.remove_tree(child)
                else:
                    child.unlink(missing_ok=True)
            self.remove_secrets()
        for directory in reversed(self._created):
            try:
                directory.rmdir()
            except OSError:  # not empty
                return

    def write_json(self, name: str, obj: Any, *, durable: bool = False) -> None:
        """Write the file `name` atomically; `durable`: survive a power cut.

        Non-finite floats become "NaN", "+Inf", "-Inf", as strict JSON requires.

        Raises:
            StoreError: the old file is unchanged.
        """
        try:
            text = json.dumps(obj, allow_nan=False)
        except (TypeError, ValueError):  # it has more than JSON
            text = json.dumps(plain_json(obj), allow_nan=False)
        with suppress(DecodeError):  # half of a surrogate pair
            text = msgspec.json.format(text, indent=1)
        try:
            files.replace_file(self.path / name, f"{text}\n".encode(), durable=durable)
        except OSError as error:
            raise StoreError(f"cannot write {self.path / name}: {error.strerror}") from error

    def describe(self) -> RunDescription:
        """Return the content of run.json. Raises StoreError."""
        with reading_recorded_data(
            str(self.path / "run.json"), "restore it from a copy of the run directory"
        ):
            return Payload(self.read_json("run.json")).parse(RunDescription)

    def read_json(self, name: str) -> Any:
        """Return the content of the file `name`. Raises StoreError."""
        try:
            return files.read_json(self.path / name)
        except OSError as error:
            raise StoreError(f"cannot read {self.path / name}: {error.strerror}") from error
        except ValueError as error:
            raise StoreError(f"{self.path / name} is not JSON: {error}") from error


def _refuse_unfit(path: Path) -> None:
    """Raise StoreError or OSError for an existing directory that cannot become a run."""
    if not path.is_dir():
        return
    if any(path.iterdir()):
        raise StoreError(
            f"{path} is not empty",
            hint="each run needs an empty directory: choose another with --run-dir DIR",
        )
    if not files.is_own_directory(path.resolve()):
        raise StoreError(
            f"{path} belongs to another user, who could change the run's record",
            hint=f"use a directory of your own: --run-dir {path / 'run'}",
        )


def _refuse_format(path: Path, number: object, writer: str) -> None:
    """Raise StoreError for a run directory that this version reads only in parts, or wrongly."""
    if type(number) is not int:
        raise TypeError("format")
    if OLDEST_FORMAT <= number <= FORMAT:
        return
    known = f"{OLDEST_FORMAT} to {FORMAT}" if OLDEST_FORMAT < FORMAT else f"{FORMAT}"
    release = writer if _VERSION.fullmatch(writer) else ""
    raise StoreError(
        f"{path} has the format {number} of supervise {release or 'another version'}; this is "
        f"supervise {__version__}, which reads format {known}",
        hint="nothing was read or changed; in an environment of its own: "
        + (f"pip install supervise-train=={release}" if release else "the version that wrote it"),
    )


def _near(path: Path) -> str:
    """Return a hint that names the newest run below `path`: one elsewhere is another run."""
    for parent in (path, path / RUNS):
        runs = sorted(file.parent for file in parent.glob("*/run.json"))
        if runs:
            return f"did you mean {runs[-1]}?"
    return "start a run with: supervise --run-dir DIR -- COMMAND (default: below ./runs)"


MAX_RUNS = 1000  # the newest; the ids begin with the time


def add_run(run: RunDir, environ: Mapping[str, str]) -> None:
    """Make a run findable from everywhere. It never fails: a run does without."""
    with suppress(OSError):
        folder = _folder(environ)
        files.make_directory(folder)
        link = folder / run.id
        fresh = files.hidden_name(link)
        fresh.symlink_to(run.path)
        fresh.replace(link)
        for name in sorted(os.listdir(folder))[:-MAX_RUNS]:  # noqa: PTH208 - names alone
            (folder / name).unlink()


def list_run_directories(environ: Mapping[str, str]) -> dict[str, Path]:
    """Return the directories by run id, the newest first, without a look at them."""
    directories = {}
    with suppress(OSError):
        folder = _folder(environ)
        for name in sorted(os.listdir(folder), reverse=True):  # noqa: PTH208 - names alone
            with suppress(OSError):  # not a link of ours
                directories[name] = (folder / name).readlink()
    return directories


def is_same_run(run_id: str, path: Path) -> bool:
    """Return whether a directory is still that of this run."""
    with suppress(StoreError):
        return RunDir.open(path).id == run_id
    return False


def _folder(environ: Mapping[str, str]) -> Path:
    return state_directory(environ) / "runs"


def state_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory of what is kept of a user. Raises OSError: there is no home."""
    return _base(environ, "XDG_STATE_HOME", ".local/state") / "supervise"


def cache_directory(environ: Mapping[str, str], run_id: str) -> Path:
    """Return the directory of the curves of a run. Raises OSError: there is no home."""
    return _base(environ, "XDG_CACHE_HOME", ".cache") / "supervise" / "pyramids" / run_id


def _base(environ: Mapping[str, str], variable: str, default: str) -> Path:
    """Return a directory of the XDG specification, which ignores a relative one."""
    base = Path(environ.get(variable, ""))
    if base.is_absolute():
        return base
    home = Path(environ.get("HOME", ""))
    if not home.is_absolute():
        with suppress(KeyError):
            home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    if not (home.is_absolute() and home.is_dir()):
        raise NotADirectoryError(f"there is no home directory {home}")
    return home / default
