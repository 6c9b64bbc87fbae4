"""Recordings folded through the engine: what is kept, and that it is what the engine says."""

from __future__ import annotations

import itertools

import pytest

from supervise.catalog import load_policy
from supervise.core import initial_state
from supervise.core import step as step_engine
from supervise.core.model import Announced, Exited, Frame, Launched, Tick
from supervise.lab import backtest_source, load_in_shadow_mode, make_events, run_backtest
from supervise.recordings import Recording, find_recordings

POLICY = """
version: supervise/v1
policy: {name}
mode: {mode}
savepoints: {{every: 25, keep: 4}}
detectors:
  high: {{kind: threshold, metric: train_loss_raw, gt: {high}}}
  higher: {{kind: threshold, metric: train_loss_raw, gt: 9}}
  rate: {{kind: threshold, metric: learning_rate, gt: 1}}
  silent: {{kind: absence}}
rules:
  - {{id: notice, when: high, sev: SEV2}}
  - {{id: act, when: higher, sev: SEV1, run: back}}
  - {{id: hot, when: rate, sev: SEV1}}
  - {{id: stuck, when: silent, sev: SEV0}}
runbooks:
  back: [snapshot, {{rollback: {{at_least: 10}}}}, verify]
budgets: {{all: {{max: 4}}, rollback: {{max: 1}}}}
"""


@pytest.fixture
def write(tmp_path):
    """A function that writes a policy and returns its path."""

    def make(name="mine", mode="enforce", high=5):
        path = tmp_path / f"{name}.yaml"
        path.write_text(POLICY.format(name=name, mode=mode, high=high))
        return path

    return make


def _losses(tmp_path, name, losses, first=0):
    path = tmp_path / f"{name}.csv"
    lines = [f"{first + i},{'' if loss is None else loss}" for i, loss in enumerate(losses)]
    path.write_text("\n".join(["step,loss", *lines]) + "\n")
    return path


def _one(path, policy):
    (found,) = backtest_source(find_recordings([path])[0], [load_in_shadow_mode(policy)])
    return found[0]


CALM, SPIKE = [2.0] * 150, [6.0, 6.0, 10.0, 2.0]


def test_a_severity_counts_from_the_step_of_its_raising(tmp_path, write):
    """OpenedRunbook at 150, raised at 152, when it would have rolled back.

    No learning rate is in this file, and no recording has a heartbeat.
    """
    outcome = _one(_losses(tmp_path, "a", CALM + SPIKE + CALM), write())

    told = [(a.step, a.severity, a.rule, a.incident, a.change, a.row) for a in outcome.alarms]
    assert told == [
        (150, "SEV2", "notice", "inc-1", "opened", 151),
        (152, "SEV1", "act", "inc-1", "raised", 153),
    ]
    (act,) = outcome.actions
    assert (act.step, act.runbook, act.touches_job, act.destructive, act.stops) == (
        152,
        "back",
        True,
        True,
        False,
    )
    assert outcome.firings == {"notice": 1, "act": 1}
    assert outcome.rows == 304
    assert (outcome.inactive, outcome.no_heartbeat) == (["hot"], ["stuck"])


def test_it_is_what_the_engine_says(tmp_path, write):
    """The same events step by step, in shadow; one rollback is allowed of three."""
    path = _losses(tmp_path, "a", (CALM + SPIKE) * 3 + CALM)
    policy = load_policy(write(), mode="shadow")
    state, said = initial_state(policy), []
    piece = Recording("", ("train_loss_raw",), [])
    piece.rows = [(i, 0, 0, (v,)) for i, v in enumerate((CALM + SPIKE) * 3 + CALM)]
    for event in make_events(piece):
        state, decisions = step_engine(policy, state, event)
        said += [
            (d.step, d.severity, d.rule, d.incident)
            for d in decisions
            if d.kind == "incident" and d.data["what"] in ("opened", "raised")
        ]

    outcome = _one(path, policy=write())
    incidents = outcome.alarms
    assert [(alarm.step, alarm.severity, alarm.rule, alarm.incident) for alarm in incidents] == said
    assert len(said) == 6
    assert len(outcome.actions) == 3
    assert outcome.budgets == {"all": [1, 4, 0], "rollback": [1, 1, 2]}


def test_an_alarm_knows_whether_people_would_be_told(tmp_path, write):
    outcome = _one(_losses(tmp_path, "a", ([2.0] * 40 + [10.0]) * 20), write())

    told = [(a.rule, a.notified) for a in outcome.alarms]
    assert told[:2] == [("act", True), ("notice", False)]
    assert 2 < sum(known for _, known in told) < len(told) // 2


def test_pieces_of_a_run_start_from_nothing_and_count_on(tmp_path, write):
    path = tmp_path / "a.csv"
    rows = [*enumerate([*CALM, 6.0]), *enumerate([2.0] * 70 + [6.0, 10.0])]
    path.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in rows))
    outcome = _one(path, write())

    assert outcome.pieces == [(0, 150, 151), (0, 71, 72)]
    assert [(a.step, a.incident, a.row) for a in outcome.alarms] == [
        (150, "inc-1", 151),
        (70, "inc-2", 222),
        (71, "inc-2", 223),
    ]


def test_the_clock_is_the_step_time_or_a_second():
    """Nonsense counts as a second; ticks come now and then, and never with a beat."""
    piece = Recording("", ("step_time",), [])
    piece.rows = [(i, 0, 0, (0.5,)) for i in range(100)]
    piece.rows[3] = (3, 0, 0, (float("nan"),))
    piece.rows[4] = (4, 0, 0, (-1.0,))
    events = list(make_events(piece))

    assert [type(event) for event in events[:3]] == [Launched, Announced, Frame]
    assert isinstance(events[-1], Exited)
    frames = [event.at_ns for event in events if isinstance(event, Frame)]
    assert [b - a for a, b in itertools.pairwise(frames)][1:5] == [
        500_000_000,
        1_000_000_000,
        1_000_000_000,
        500_000_000,
    ]
    ticks = [event for event in events if isinstance(event, Tick)]
    assert [tick.at_ns for tick in ticks] == [frames[63]]
    assert not any(tick.beats for tick in ticks)


def test_a_column_that_is_logged_now_and_then_is_not_missing(tmp_path, write):
    header, rare, gone = "step,loss,lr\n", "", ""
    for step in range(1200):
        rare += f"{step},2.0,{0.5 if step % 25 == 0 else ''}\n"
        gone += f"{step},2.0,{0.5 if step < 300 else ''}\n"
    (tmp_path / "rare.csv").write_text(header + rare)
    (tmp_path / "gone.csv").write_text(header + gone)

    assert _one(tmp_path / "rare.csv", write()).alarms == []
    (alarm,) = _one(tmp_path / "gone.csv", write()).alarms
    assert (alarm.rule, alarm.severity) == ("hot", "SEV1")
    assert 300 < alarm.step < 700


def test_several_ranks_are_judged_and_the_first_one_is_counted(tmp_path, write):
    path = tmp_path / "a.csv"
    rows = [(s, r, 16.0 if (s, r) == (90, 1) else 2.0) for s in range(120) for r in (0, 1)]
    path.write_text("step,rank,loss\n" + "".join(f"{s},{r},{v}\n" for s, r, v in rows))
    outcome = _one(path, write())

    assert outcome.rows == 120
    assert [a.step for a in outcome.alarms] == [90]


@pytest.mark.slow
def test_processes_give_the_same_in_the_same_order(tmp_path, write):
    paths = [_losses(tmp_path, f"r{i}", CALM[: 100 + i] + SPIKE) for i in range(4)]
    names = [str(write())]
    alone, left_out = run_backtest(paths, names, {}, 1, []), []
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    spread = run_backtest([tmp_path], names, {}, 2, left_out)

    assert spread == alone
    assert [run[0].run for run in spread] == ["r0", "r1", "r2", "r3"]
    assert left_out == [f"{tmp_path / 'table.csv'}: no column of steps"]
