"""`supervisor.log` of the run directory: what goes wrong in the supervisor itself, as JSON lines.

    {"event", "level", "logger", "timestamp", "run", "incident"[, "exception"][, "dropped"]}

Whoever catches an exception of ours logs it to the logger of its module; what is shown at the
terminal is logged too, also under `--quiet`. A record waits in a bounded queue for a thread that
formats and writes it. A disk that hangs stops that thread alone: what finds the queue full is
dropped and counted in the next line that is written. Secrets are taken out before.
"""

from __future__ import annotations

import logging
import os
import queue
import traceback
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from ..core.model.redaction import Redactor
from ..store import files
from ..threads import Thread

NAME = "supervisor.log"
MAX_WAITING = 256  # records; project default
MAX_BYTES, BACKUPS = 1 << 20, 3  # project defaults
CLOSE_S = 1.0  # for what still waits at the end

Line = MutableMapping[str, Any]


class SupervisorLog(logging.Handler):
    """Takes the records of all loggers of this package, between `start` and `stop`.

    Args:
        path: the file.
        run: id of the run.
        incident: returns the id of the open incident, None without one. Called on any thread.
    """

    def __init__(
        self, path: Path, run: str, incident: Callable[[], str | None], redactor: Redactor
    ) -> None:
        super().__init__(logging.INFO)
        self._path = path
        self._run = run
        self._incident = incident
        self._redactor = redactor
        self._queue: queue.Queue[logging.LogRecord | None] = queue.Queue(MAX_WAITING)
        self._dropped = 0
        self._thread = Thread(target=self._work, name="supervisor.log", daemon=True)

    def start(self) -> None:
        """Begin; without a thread to spare nothing is logged."""
        try:
            self._thread.start()
        except RuntimeError:  # at the limit of processes and threads
            return
        logger = logging.getLogger(__package__.partition(".")[0])
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        logger.propagate = False

    def stop(self) -> None:
        """End, after `CLOSE_S` at the latest."""
        logging.getLogger(__package__.partition(".")[0]).removeHandler(self)
        if not self._thread.is_alive():
            return
        try:
            if self._dropped:
                last = {"msg": "the log is incomplete", "name": __name__, "levelname": "WARNING"}
                record = logging.makeLogRecord({**last, "dropped": self._dropped})
                self._queue.put(record, timeout=CLOSE_S)
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:  # the disk hangs
            return
        self._thread.join(CLOSE_S)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record; never waits."""
        if record.exc_info:  # at once: a traceback would keep its frames alive
            record.exc_text = "".join(traceback.format_exception(*record.exc_info))
            record.exc_info = None
        record.incident, record.dropped = self._incident(), self._dropped
        try:
            self._queue.put_nowait(record)
            self._dropped = 0
        except queue.Full:
            self._dropped += 1

    # ── the thread ────────────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        record = self._queue.get()
        if record is None:
            return
        try:
            handler = _Rotating(self._path, maxBytes=MAX_BYTES, backupCount=BACKUPS, delay=True)
            handler.setFormatter(self._formatter())
        except Exception:  # a broken installation costs the log, not the run
            return
        while record is not None:
            handler.handle(record)
            record = self._queue.get()
        with suppress(OSError):  # of what was buffered, on a full disk
            handler.close()

    def _formatter(self) -> logging.Formatter:
        import structlog  # here, where nobody waits for the import

        return structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                self._bind,
            ],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                self._redact,
                structlog.processors.JSONRenderer(default=str),
            ],
        )

    def _bind(self, _logger: Any, _method: str, line: Line) -> Line:
        """Add what belongs to every line."""
        record: logging.LogRecord = line["_record"]
        line["run"], line["incident"] = self._run, getattr(record, "incident", None)
        if record.exc_text:
            line["exception"], record.exc_text = record.exc_text, None
        if dropped := getattr(record, "dropped", 0):
            line["dropped"] = dropped
        return line

    def _redact(self, _logger: Any, _method: str, line: Line) -> Line:
        clean: Line = self._redactor.tree(dict(line))
        return clean


class _Rotating(RotatingFileHandler):
    """Opens as all files of a run are opened, and is silent where the disk fails."""

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        fd = files.open_file(Path(self.baseFilename), flags)
        return os.fdopen(fd, "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """Drop it."""
