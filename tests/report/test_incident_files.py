"""incident.json and its views, kept while the supervisor judges: the same as made from the log."""

import json
from types import SimpleNamespace

import jsonschema
import pytest

from supervise.catalog import load_policy, shipped_folder
from supervise.core.model import Frame
from supervise.report import (
    IncidentFiles,
    RunOrigin,
    build_incident_report,
    describe_run,
    incident_files,
    read_records,
    read_tapes,
)
from supervise.store import Audit
from tests.support import recorded_run

SPIKE = (*[2.0 + 0.01 * (i % 5) for i in range(40)], 8.0, 7.0, *[2.0] * 40)
SECOND, WALL = recorded_run.SECOND, "2026-01-05T10:11:12.345Z"


@pytest.fixture
def watched(small, tmp_path, monkeypatch):
    """A function that records a run with its incident files, and returns `(run, files, writes)`."""

    def watch(*losses, **options):
        window, writes = [], []
        made = SimpleNamespace(files=None)

        class Recorder(recorded_run.Recorder):
            def __init__(self, *args):
                super().__init__(*args)
                self.on_record = lambda record: made.files.on_record(record)

            def record_event(self, event, **how):
                number = super().record_event(event, **how)
                if isinstance(event, Frame):
                    made.files.flush(event.at_ns)
                    made.files.on_frame(event, recorded_run_names)
                    window.append((recorded_run_names, event))
                return number

        recorded_run_names = ("train_loss_raw", "grad_global_norm")
        create = recorded_run.RunDir.create

        def creating(*args, **more):
            run = create(*args, **more)
            policy = load_policy(run.policy_path)  # rules say where they are written
            made.files = IncidentFiles(run, lambda: policy, lambda: list(window))
            return run

        write = incident_files.write_incident

        def writing(incidents, report):
            writes.append(report)
            write(incidents, report)

        monkeypatch.setattr(recorded_run, "Recorder", Recorder)
        monkeypatch.setattr(recorded_run.RunDir, "create", creating)
        monkeypatch.setattr(incident_files, "write_incident", writing)
        events = recorded_run.make_frames(0, *losses)
        run = recorded_run.record_run(tmp_path / "run", events, policy=small, **options)
        return run, made.files, writes

    return watch


def test_what_was_written_live_is_what_the_log_gives(watched):
    """At each stage valid, at most once a second, at the end the same as made from the records."""
    run, files, writes = watched(*SPIKE)
    files.close()
    home = run.incidents_path / "inc-1"
    kept = json.loads((home / "incident.json").read_text())
    policy = load_policy(run.policy_path)
    records = read_records(run)
    origin = RunOrigin.from_description(describe_run(run), str(run.path), incident_files.PHASE)
    tapes = read_tapes(run, records, "inc-1")
    again = build_incident_report(records, "inc-1", origin, {policy.digest: policy}, tapes)

    assert sorted(path.name for path in home.iterdir()) == [
        "incident.html",
        "incident.json",
        "summary.md",
    ]
    assert kept == json.loads(again.encode()) and kept["final"]
    assert writes[0].status != kept["state"] == "RECOVERED"
    assert 3 <= len(writes) < len(SPIKE) / 2
    schema = json.loads((shipped_folder("policies") / "incident.schema.json").read_text())
    for report in writes:
        jsonschema.validate(json.loads(report.encode()), schema)


def test_another_supervisor_goes_on_with_them(watched):
    run, first, _ = watched(*SPIKE[:42], ended=False)
    before = first.report("inc-1")
    policy = load_policy(run.policy_path)
    second = IncidentFiles(run, lambda: policy, tuple)
    second.resume()

    assert before is not None and second.report("inc-1") == before


def test_a_message_about_no_incident_asks_for_no_files(watched, caplog):
    """Such as one about the end of the run, behind an incident that is over."""
    _, files, _ = watched(*SPIKE)
    files.close()

    assert files.report("") is None
    assert caplog.messages == []


def test_records_of_another_version_cost_only_the_files(watched, caplog):
    """A supervisor that takes the run over goes on without the files of the open incident."""
    run, _, _ = watched(*SPIKE[:42], ended=False)
    log = Audit.open(run.audit_path, run.id, at_ns=0, wall=WALL)
    body = {"reason": "", "data": {}}
    log.append("unheard-of", actor="engine", at_ns=0, wall=WALL, step=41, body=body, sync=True)
    log.close()
    policy = load_policy(run.policy_path)
    files = IncidentFiles(run, lambda: policy, tuple)
    files.resume()
    files.flush(10 * SECOND)

    assert "cannot be made" in caplog.text and files.report("inc-1") is None


def test_a_full_disk_costs_only_the_files(watched, monkeypatch, caplog):
    """Nothing reaches the loop: neither an error of the disk, nor one of ours."""

    def full(incidents, report):
        raise OSError(28, "No space left on device")

    run, files, _ = watched(*SPIKE[:42], ended=False)
    monkeypatch.setattr(incident_files, "write_incident", full)
    files.close()
    assert "No space left" in caplog.text

    monkeypatch.setattr(incident_files, "build_incident_report", lambda *args: 1 / 0)
    again = IncidentFiles(run, lambda: load_policy(run.policy_path), tuple)
    again.resume()
    again.flush(10 * SECOND)
    assert "cannot be made" in caplog.text and again.report("inc-1") is None
