"""The decisions of a run as lines, and as they come."""

from __future__ import annotations

import json
import threading
import time

from supervise.cli import events
from supervise.cli._runs import LogTail
from supervise.store import Audit


def test_events_are_lines_without_the_noise(supervise, recorded):
    """Incidents and decisions; `--all` adds rules and messages; JSON is as stored."""
    run = recorded()
    code, out, err = supervise("events", run.path)

    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "01-05 10:11:12Z  -            run_start   the job was started"
    assert any("step 100     incident    SEV0 inc-1 SEV0 nonfinite" in line for line in lines)
    assert not any(" notify_intent " in line for line in lines)
    assert " notify_intent " in supervise("events", "--all", run.path)[1]
    records = [json.loads(line) for line in supervise("events", "--json", run.path)[1].splitlines()]
    assert len(records) == len(lines)
    assert records[-1]["kind"] == "run_end" and records[-1]["data"]["exit_code"] == 3


def test_since_is_a_span_or_a_moment(supervise, recorded):
    run = recorded()
    for since in ("2026-01-05", "2026-01-05T10:11:12+00:00", "9999d"):
        assert supervise("events", "--since", since, run.path)[1].count("run_start") == 1
    for since in ("10m", "2026-01-05T10:11:13"):
        assert supervise("events", "--since", since, run.path)[1] == ""
    code, _, err = supervise("events", "--since", "yesterday", run.path)
    assert (code, "'yesterday' is not a time" in err) == (64, True)


def test_following_ends_with_the_run_and_outlives_a_supervisor(supervise, recorded, monkeypatch):
    """A dead supervisor is reported once; its successor's records are printed, too."""
    monkeypatch.setattr(events, "POLL_S", 0.01)
    run = recorded(end=None)

    def adopt():
        time.sleep(0.1)
        audit = Audit.open(run.audit_path, run.id, at_ns=0, wall="2026-01-05T10:11:12.345Z")
        for kind, data in (("note", {}), ("run_end", {"exit_code": 0})):
            body = {"reason": f"{kind} written later", "data": data}
            extra = {"actor": "app", "at_ns": 1, "wall": "2026-01-05T10:12:00.000Z", "step": 130}
            audit.append(kind, body=body, sync=False, **extra)
            time.sleep(0.05)
        audit.close()

    thread = threading.Thread(target=adopt)
    thread.start()
    code, out, err = supervise("events", "-f", run.path)
    thread.join()

    assert code == 0
    assert [line.split()[-3:] for line in out.splitlines()[-2:]] == [
        ["note", "written", "later"],
        ["run_end", "written", "later"],
    ]
    assert err.count("the supervisor of") == 1 and "supervise adopt" in err


def test_a_half_written_record_is_read_when_it_is_whole(tmp_path):
    """And a truncated one that was removed is not read again."""
    path, digest = tmp_path / "audit.log", b"0" * 64
    tail = LogTail(path)
    assert tail.read() == []
    path.write_bytes(digest + b' {"seq":0}\n' + digest + b' {"se')
    assert tail.read() == [{"seq": 0}]
    with path.open("ab") as file:
        file.write(b'q":1}\n')
    assert tail.read() == [{"seq": 1}]
    path.write_bytes(path.read_bytes()[:20])
    assert tail.read() == []
