"""What a scenario may say: each mistake in one is told at its own place."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervise.catalog import check_file

HEAD = "version: supervise/v1\npolicy: small.yaml\ntests:\n  - name: one\n"
SMALL = """\
version: supervise/v1
mode: enforce
use: [hang]
budgets: {all: {max: 3}, rollback: {max: 2}}
"""
SERIES = '    series: {train_loss_raw: "2x9"}\n'
EXPECT = SERIES + "    expect: "
NONE = EXPECT + "[]\n    "
INJECT = NONE + "inject: "
LOSS = "    series: {train_loss_raw: "

MISTAKES = [
    (EXPECT + "[{by: 3}]\n", "6:14", "give exactly one of rule, state, actions"),
    (EXPECT + "[{by: 3, state: nominal, severity: SEV1}]\n", "6:48", "give exactly one"),
    (EXPECT + "[{state: nominal}]\n", "6:22", "needs a time: one of at, by, between, end"),
    (EXPECT + "[{at: 1, end: true, state: nominal}]\n", "6:27", "needs a time"),
    (EXPECT + "[{between: [5, 3], state: nominal}]\n", "6:24", "ends before it begins"),
    (EXPECT + "[{by: 3, state: nominal, is: on}]\n", "6:42", "belongs to a rule"),
    (EXPECT + "[{end: true, budget: {alll: 1}}]\n", "6:35", "no budget 'alll' (did"),
    (EXPECT + "[{by: 3, state: nominal, count: 2}]\n", "6:45", "means nothing with state"),
    (EXPECT + "[{by: 3, rule: stuck}]\n", "6:28", "no rule 'stuck' (did you mean 'hang"),
    (EXPECT + "[{by: 3, rul: hang.stuck}]\n", "6:22", "has no key 'rul' (did you mean"),
    (INJECT + "[{at: 3}]\n", "7:19", "give exactly one of gap, nan"),
    (INJECT + "[{at: 1, gap: 3, for: 2}]\n", "7:35", "means nothing"),
    (INJECT + "[{at: 1, nan: [loss]}]\n", "7:28", "no series 'loss'"),
    (INJECT + "[{at: 1, silent_rank: 1}]\n", "7:14", "no rank 1; ranks"),
    (INJECT + "[{at: 1, crash_after: intend}]\n", "7:35", "'intent'"),
    (INJECT + "[{at: 1, clock_jump: 3}]\n", "7:34", "needs a unit"),
    (NONE + "noise: {loss: 1}\n", "7:13", "noise for 'loss', which has no"),
    (NONE + "every: 0s\n", "7:12", "must be between 1ms and 1h"),
    (NONE + 'after_rollback: {a: "1x2", b: "1"}\n', "7:21", "lengths: a 2, b 1"),
    (NONE + 'after_rollback: [{a: "1"}, {a: "1y"}]\n', "7:37", "'1y' is not part"),
    (LOSS + "2}\n    expect: []\n", "5:30", "should be a series such as '2.4x300 5.0-0.1x20', not"),
    (LOSS + '"2x9 3 4xx"}\n    expect: []\n', "5:37", "'4xx' is not part of one"),
    (LOSS + '"1x150000 1x60000"}\n    expect: []\n', "5:13", "is longer than 200000 steps"),
]


@pytest.fixture(autouse=True)
def small(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL, "utf-8")


@pytest.mark.parametrize(("text", "where", "said"), MISTAKES)
def test_a_mistake_is_told_where_it_stands(text, where, said, tmp_path):
    (tmp_path / "t.yaml").write_text(HEAD + text, "utf-8")
    (problem,) = check_file(str(tmp_path / "t.yaml")).errors

    assert said in str(problem)
    assert problem.location.endswith(f"t.yaml:{where}")


def test_what_is_right_is_right(tmp_path):
    text = (
        SERIES
        + """\
    expect:
      - {never: [hang.stuck, stop, SEV0, holding]}
      - {never: [SEV1], by: 3}
      - {rule: hang.stuck, count: 0}
      - {end: true, budget: {all: 0, rollback: 0}}
      - {by: 3, actions: []}
    inject: [{at: 1, nan: [train_loss_raw], for: 2}, {at: 1, silent_rank: 1}]
    after_rollback: [{train_loss_raw: "1x3"}, {other: "2"}]
    ranks: 2
"""
    )
    (tmp_path / "t.yaml").write_text(HEAD + text, "utf-8")
    found = check_file(str(tmp_path / "t.yaml"))

    assert (found.sort, found.errors) == ("tests", ())
