"""The run directory: all that is kept of a run, and where each thing is.

    audit.log      what was decided and done, hash-chained      journal/      every event
    policy.yaml    the first policy as resolved                 policies/     those of reloads
    probe.json     what the probe is told                       probe/        the probe's marks
    incidents/     evidence, one directory per incident         state.json    the newest status
    control/       words of operators                           run.json      what was started
    launch.json    the newest process of the job                relaunch/     stages of each one
    environ.json   the job's environment    command.json  its command, as it was given
    supervisor.log  errors of our own, as JSON lines
    quarantine.json  data that is passed over, once there is any

Secrets of the job are in `environ.json` and `command.json` alone: send somebody the rest. Knows
names and atomic writing, not contents.
"""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..core.model.json_form import plain
from ..core.model.policy import Policy
from ..core.model.redaction import Redactor
from ..errors import StoreError
from . import files

RUNS = Path("runs")
COMMAND = "command.json"


def is_run(path: Path) -> bool:
    """Return whether a path is the directory of a run. Raises StoreError where nobody may look."""
    try:
        return (path / "run.json").is_file()
    except OSError as error:
        raise StoreError(f"cannot read {path / 'run.json'}: {error.strerror}") from error


class RunDir:
    """The directory of one run; get one from `create` or `open`."""

    def __init__(self, path: Path, run_id: str, made: Sequence[Path] = ()) -> None:
        self.path = path
        self.id = run_id
        self._made = made  # directories that did not exist before, outermost first

    @classmethod
    def create(
        cls,
        path: Path | None,
        *,
        argv: Sequence[str],
        policy: Policy,
        wall: str,
        info: Mapping[str, Any] | None = None,
        redactor: Redactor | None = None,
    ) -> RunDir:
        """Make the directory of a new run; its absolute path is in `path`.

        Args:
            path: None for `./runs/<utc>-<id>`; else a directory that is empty or not there yet.
            argv: the job's command, as given; as such it is kept in command.json alone.
            wall: UTC now, ISO-8601; names the run.
            info: further keys of run.json.
            redactor: takes the secrets out of run.json.

        Raises:
            StoreError: it cannot be made, or is not empty.
        """
        stamp = wall[:19].replace("-", "").replace(":", "").replace("T", "-")
        clean = redactor or Redactor(argv=argv)
        run_id = f"{stamp}-{secrets.token_hex(3)}"
        path = (RUNS / run_id if path is None else path).absolute()
        made = [p for p in (*reversed(path.parents), path) if not p.exists()]
        try:
            _refuse_unfit(path)
            files.make_directory(path)
            run = cls(path, run_id, made)
            for directory in (run.journal_path, run.marks_path, run.incidents_path):
                files.make_directory(directory, exist_ok=False)
            files.replace(path / "policy.yaml", policy.resolved.encode(), durable=True)
            described = {
                "run": run_id,
                "created": wall,
                "argv": clean.command(argv),
                "cwd": str(Path.cwd()),
                "policy": policy.name,
                "policy_digest": policy.digest,
                "mode": policy.mode,
                "host": socket.gethostname(),
                "supervise": __version__,
                "python": sys.version.split()[0],
                **clean.tree(info or {}),
            }
            run.write_json(COMMAND, list(argv), durable=True)
            run.write_json("run.json", described, durable=True)
            files.sync_directory(path.parent)
        except OSError as error:
            raise StoreError(
                f"cannot make the run directory {path}: {error.strerror}",
                hint="name a writable place with --run-dir",
            ) from error
        return run

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Open the directory of a run.

        Raises:
            StoreError: it holds none; the hint names one that does, if there is one near.
        """
        try:
            described = files.read_json(path / "run.json")
            if not isinstance(described["run"], str):
                raise TypeError("run")
            return cls(path.absolute(), described["run"])
        except (FileNotFoundError, NotADirectoryError):
            there = "holds no run (no run.json)" if path.is_dir() else "is not a directory"
            raise StoreError(f"{path} {there}", hint=_near(path)) from None
        except OSError as error:
            raise StoreError(f"cannot read {path / 'run.json'}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError):
            raise StoreError(
                f"{path / 'run.json'} does not describe a run",
                hint="restore it from a copy of the run directory",
            ) from None

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
        """Directory of the marks that the probe leaves."""
        return self.path / "probe"

    @property
    def probe_config_path(self) -> Path:
        """The file that tells the probe what to do."""
        return self.path / "probe.json"

    @property
    def quarantine_path(self) -> Path:
        """What the job must not train on again."""
        return self.path / "quarantine.json"

    @property
    def policy_path(self) -> Path:
        """The policy as resolved when the run began."""
        return self.path / "policy.yaml"

    def command(self) -> list[str]:
        """Return the job's command as it was given, secrets too. Raises StoreError."""
        return [str(word) for word in self.read_json(COMMAND)]

    def discard(self) -> None:
        """Remove all of it, for a job that could not be started; a directory given to us stays."""
        for child in self.path.iterdir():
            if child.is_dir():
                shutil.rmtree(child, ignore_errors=True)
            else:
                child.unlink(missing_ok=True)
        for made in reversed(self._made):
            try:
                made.rmdir()
            except OSError:  # something else lives there by now
                return

    def write_json(self, name: str, obj: Any, *, durable: bool = False) -> None:
        """Write the file `name` atomically; `durable` also through a power cut.

        Non-finite floats become "NaN", "+Inf", "-Inf", so that every JSON reader can read it.

        Raises:
            StoreError: the old file is still there.
        """
        text = json.dumps(plain(obj), allow_nan=False, indent=1) + "\n"
        try:
            files.replace(self.path / name, text.encode(), durable=durable)
        except OSError as error:
            raise StoreError(f"cannot write {self.path / name}: {error.strerror}") from error

    def read_json(self, name: str) -> Any:
        """Return the content of the file `name`. Raises StoreError."""
        try:
            return files.read_json(self.path / name)
        except OSError as error:
            raise StoreError(f"cannot read {self.path / name}: {error.strerror}") from error
        except ValueError as error:
            raise StoreError(f"{self.path / name} is not JSON: {error}") from error


def _refuse_unfit(path: Path) -> None:
    """Refuse a directory that is there and cannot hold a run. Raises StoreError or OSError."""
    if not path.is_dir():
        return
    if any(path.iterdir()):
        raise StoreError(
            f"{path} is not empty",
            hint="a run has a directory of its own: choose another --run-dir",
        )
    if not files.is_own_directory(path.resolve()):
        raise StoreError(
            f"{path} belongs to another user, who could change the run's record",
            hint=f"let the run have a directory of its own: --run-dir {path / 'run'}",
        )


def _near(path: Path) -> str:
    """Return a hint that names the newest run below `path` or `./runs`."""
    for parent in (path, path / RUNS, RUNS):
        runs = sorted(found.parent for found in parent.glob("*/run.json"))
        if runs:
            return f"did you mean {runs[-1]}?"
    return "supervise --run-dir DIR -- COMMAND makes one; without --run-dir runs are in ./runs"
