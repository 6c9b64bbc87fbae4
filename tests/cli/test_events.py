"""The decisions of a run as lines, and as they come."""

from __future__ import annotations

import json
import threading
import time

from supervise.core.model import Notice
from tests.support.recorded_run import SECOND


def test_events_are_lines_without_the_noise(supervise, recorded):
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


def test_a_rollback_that_is_not_possible_any_more_is_told_once(supervise, keep_run, make_frames):
    notices = [Notice(30 * SECOND, "capabilities", "rollback: yes")]
    notices += [Notice(31 * SECOND, "rollback-unavailable", "the parameters are others")] * 2
    run = keep_run([*make_frames(0, 2.0), *notices])

    told = supervise("events", "--all", run.path)[1]
    assert told.count("SEV2 no rollback is possible from here on") == 1


def test_since_is_a_span_or_a_moment(supervise, recorded):
    run = recorded()
    for since in ("2026-01-05", "2026-01-05T10:11:12+00:00", "9999d"):
        assert supervise("events", "--since", since, run.path)[1].count("run_start") == 1
    for since in ("10m", "2026-01-05T10:11:13"):
        assert supervise("events", "--since", since, run.path)[1] == ""


def test_following_ends_with_the_run_and_outlives_a_supervisor(supervise, recorded, alive):
    """A dead one is reported once; the records of its successor are printed, half a one is not."""
    run = recorded(end=None)
    with run.audit_path.open("ab") as file:
        file.write(b"0" * 64 + b' {"seq":99,"kind":"no')

    def adopt():
        time.sleep(0.1)
        audit = alive(run)
        at = {"actor": "app", "at_ns": 1, "wall": "2026-01-05T10:12:00.000Z", "step": 130}
        delivered = {"channel": "slack", "message": 12}  # the number of a record
        kinds = ("note", {}), ("notify_result", delivered), ("run_end", {"exit_code": 0})
        for kind, data in kinds:
            body = {"reason": f"{kind} written later", "data": data}
            audit.append(kind, body=body, sync=False, **at)
        audit.close()

    thread = threading.Thread(target=adopt)
    thread.start()
    code, out, err = supervise("events", "-f", run.path)
    thread.join()

    assert code == 0
    ends = [line.split()[-3:] for line in out.splitlines()[-2:]]
    assert ends == [["note", "written", "later"], ["run_end", "written", "later"]]
    assert err.count("the supervisor of") == 1 and "supervise adopt" in err
