"""The log of what goes wrong in the supervisor itself."""

import json
import logging
import subprocess
import sys

import pytest

from supervise.core.model import Redactor
from supervise.runtime import SupervisorLog
from supervise.store import read_audit

pytest.importorskip("structlog")


@pytest.fixture
def make(tmp_path):
    made = []

    def make(path=tmp_path / "supervisor.log", **options):
        redactor = Redactor({"API_TOKEN": "opensesame-1234"})
        made.append(SupervisorLog(path, "run-1", lambda: "inc-1", redactor, **options))
        return made[-1]

    yield make
    for log in made:
        log.stop()


def lines(log, tmp_path):
    log.stop()
    text = (tmp_path / "supervisor.log").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_an_exception_is_logged_with_its_traceback_and_without_secrets(make, tmp_path):
    log = make()
    log.start()
    try:
        raise RuntimeError("with opensesame-1234")
    except RuntimeError:
        logging.getLogger("supervise.runtime.loop").exception("internal error")

    (line,) = lines(log, tmp_path)
    assert line["event"] == "internal error"
    assert (line["level"], line["logger"]) == ("error", "supervise.runtime.loop")
    assert (line["run"], line["incident"]) == ("run-1", "inc-1")
    assert "in test_an_exception_is_logged" in line["exception"]
    assert "RuntimeError: with <redacted>" in line["exception"]


def test_a_full_queue_drops_counts_and_never_waits(make, tmp_path):
    log = make()
    record = logging.makeLogRecord({"msg": "x", "levelname": "INFO", "name": "supervise.x"})
    for _ in range(263):
        log.handle(record)
    log.start()

    found = lines(log, tmp_path)
    assert (len(found), found[-1]["dropped"]) == (257, 7)


def test_a_log_that_cannot_be_written_costs_nothing(make, tmp_path):
    log = make(tmp_path / "gone" / "x.log")
    log.start()
    logging.getLogger("supervise.x").error("lost")
    log.stop()

    assert not (tmp_path / "gone").exists()
    assert log not in logging.getLogger("supervise").handlers


def test_an_old_log_makes_room_for_a_new_one(make, tmp_path):
    log = make(max_bytes=1000)
    log.start()
    for number in range(100):
        logging.getLogger("supervise.x").info("%d", number)
    log.stop()

    kept = sorted(path.name for path in tmp_path.glob("supervisor.log*"))
    assert kept == ["supervisor.log", *(f"supervisor.log.{n}" for n in (1, 2, 3))]
    assert all((tmp_path / name).stat().st_size <= 1000 for name in kept)


@pytest.mark.slow
def test_an_error_before_the_watching_begins_is_logged_and_told_even_when_quiet(tmp_path):
    """The job runs on, and its exit code is passed on. Who counts on us is told."""
    broken = "import sys; sys.modules['supervise.cli._watching'] = None\n"
    start = broken + "from supervise.cli import main; main()"
    run = tmp_path / "run"
    job = [sys.executable, "-c", "raise SystemExit(5)"]

    done = subprocess.run(
        [sys.executable, "-c", start, "run", "-q", "--run-dir", run, "--", *job],
        capture_output=True,
        text=True,
    )

    (line,) = map(json.loads, (run / "supervisor.log").read_text().splitlines())
    notes = [r["data"].get("what") for r in read_audit(run / "audit.log") if r["kind"] == "note"]
    assert done.returncode == 5 and "unprotected" in notes
    assert done.stderr.startswith("supervise: SEV1 this run is not watched any more")
    assert json.loads((run / "state.json").read_text())["protection_off"].endswith("sys.modules")
    assert line["event"] == "internal error; the job continues without supervision"
    assert "in watch" in line["exception"]
    assert "ModuleNotFoundError" in line["exception"]
