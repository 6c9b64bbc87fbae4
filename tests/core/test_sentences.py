"""The sentences that no kind of message has as a template: their facts, and their text.

Those that are templates are in `tests/golden/notices.txt`.
"""

import pytest

from supervise.core import (
    NOTICES,
    RunbookExecution,
    advise_relaunch_only,
    breach_headline,
    breach_symptom,
    describe_crash,
    describe_end,
    describe_finding,
    describe_no_restart,
    describe_pending_stop,
    describe_runbook_progress,
    news_of,
)
from supervise.core.model import (
    Advice,
    IncidentClosed,
    IncidentOpened,
    JobSettings,
    MessageText,
    RelaunchSettings,
    Runbook,
    decision_from_record,
    decision_record,
)

from ..golden.notices import FACTS
from .conftest import policy


@pytest.mark.parametrize(
    ("facts", "end", "finding"),
    [
        ({"outcome": "recovered", "clear_steps": 200}, "recovered: ", "no relapse in 200 steps"),
        (
            {"outcome": "recovered", "clear_steps": 9, "ordered": True},
            "done: ",
            "no rule fired in 9 steps",
        ),
        ({"outcome": "cleared"}, "over: its rules cleared", ""),
        (
            {"outcome": "rebaselined"},
            "over: not recovered: its rules took the new level as their baseline",
            "",
        ),
        ({"outcome": "released", "released_by": "anna"}, "released by anna", ""),
        ({"outcome": "superseded", "superseded_by": "a.b"}, "superseded by a.b", ""),
        (
            {"outcome": "session_ended", "session_end": 44},
            "over: its training session ended after step 44; another one starts",
            "",
        ),
        ({"outcome": "job_ended", "returncode": 1}, "the job ended with code 1", ""),
        (
            {"outcome": "job_ended", "returncode": -9, "not_restarted": "inc-1 was held"},
            "the job ended with signal 9 (SIGKILL); not started again: inc-1 was held",
            "",
        ),
        (
            {"outcome": "job_ended", "returncode": 2, "restarted_with": "--resume /c/7"},
            "restarted with --resume /c/7, the job ended with code 2 before its first step",
            "",
        ),
    ],
)
def test_the_end_of_an_incident_is_told_by_its_facts(facts, end, finding):
    about = {"acted": True, "opened_step": 5, "breach_step": 4, "rules": ["a.b"]}
    closed = IncidentClosed(reason="", **about, **facts)

    assert describe_finding(closed) == finding
    assert describe_end(closed) == end + finding


def test_a_crash_and_its_cause_are_one_sentence():
    assert describe_crash("the job ended with code 1", "OSError: x") == (
        "the job ended with code 1: OSError: x"
    )
    assert describe_crash("the job ended with code 1", "") == "the job ended with code 1"
    assert describe_no_restart("it stalled") == "not started again: it stalled"
    assert describe_no_restart("") == ""


LOSS = {"code": "BREACH", "metric": "train_loss_raw", "value": 9.0, "threshold": 5.0}
TOKENS = {"code": "BREACH", "metric": "batch_token_entropy", "value": 2.8, "z": -50.0}
SHOWN = "entropy of the batch"
TOKENS |= {"threshold": 8.0, "clear": 4.0, "median": 4.3, "scale": 0.03}


@pytest.mark.parametrize(
    ("readings", "level", "headline", "symptom"),
    [
        ([LOSS], None, "loss 9 (limit 5)", "loss 9"),
        ([LOSS], 2.5, "loss 9 (before 2.5, limit 5)", "loss 9"),
        ([LOSS | {"where": "head.3"}], None, "loss 9 on head.3 (limit 5)", "loss 9"),
        ([LOSS | {"code": "OK"}], None, "otherwise", ""),
        # The limit is on the side of the value.
        *[
            ([TOKENS | {"value": value, "z": z}], None, f"{SHOWN} {value:g} (limit {limit})", SHOWN)
            for value, z, limit in ((2.8, -50.0, 4.06), (4.16, -5.0, 4.18), (5.8, 50.0, 4.54))
        ],
        (
            [{"code": "BREACH", "nonfinite": ["train_loss_raw"]}],
            None,
            "loss is NaN or Inf",
            "loss is NaN or Inf",
        ),
        (
            [{"code": "BREACH", "metric": "grad_global_norm", "z": 12.0, "value": 4.0}],
            None,
            "gradient norm 4 (12 times as far off as usual)",
            "gradient norm 4",
        ),
        (
            [{"code": "BREACH", "metric": "update_norm", "value": 0.0, "threshold": 0.0}],
            None,
            "update norm 0 (must be above 0)",
            "update norm 0",
        ),
        (
            [
                {"code": "BREACH", "metric": "learning_rate", "signal": "learning_rate"}
                | {"unit": "steps", "value": 64.0, "threshold": 64}
            ],
            None,
            "no learning rate for 64 steps (limit 64 steps)",
            "no learning rate for 64 steps",
        ),
        ([{"code": "BREACH", "breaching": 3, "of": 8}], None, "in 3 of the newest 8 steps", ""),
        (
            [
                {"code": "BREACH", "values": {"train_loss_raw": 2.4}, "nonfinite": []}
                | {"breaching": 3, "of": 8}
            ],
            None,
            "loss was NaN or Inf in 3 of the newest 8 steps",
            "",
        ),
        ([{"code": "BREACH"}], None, "d0", ""),
    ],
)
def test_the_readings_of_a_rule_are_one_line(readings, level, headline, symptom):
    numbers = {f"d{n}": reading for n, reading in enumerate(readings)}

    assert breach_headline(numbers, "otherwise", lambda metric: level) == headline
    assert symptom in breach_symptom(numbers)


@pytest.mark.parametrize("kind", NOTICES)
def test_the_news_in_a_recorded_message_is_its_title_without_the_incident(kind):
    form = NOTICES[kind]
    facts = {name: FACTS[name] for name in form.__struct_fields__ if FACTS[name] is not None}
    notice = form(**facts)
    texts = dict.fromkeys(("kind", "verdict", "why", "next"), "")
    text = MessageText(
        severity="SEV1",
        title=notice.title,
        step=7,
        rules=(),
        form=kind,
        facts=notice.facts,
        **texts,
    )

    assert notice.title in (news_of(text), f"inc-1: {news_of(text)}")
    assert news_of(text) == notice.news


def test_an_opening_on_record_without_a_headline_has_that_of_its_reason():
    """Of a version before."""
    opened = IncidentOpened(
        reason="SEV1 a.b: loss 9", headline="loss 9", runbook="", breach_step=3, band=None
    )
    record = decision_record(opened)
    assert decision_from_record(record) == opened
    del record["data"]["headline"]

    assert decision_from_record(record).headline == opened.reason


@pytest.mark.parametrize(
    ("give_up", "text"),
    [
        ("page", ""),
        ("stop", "the job is stopped unless it recovers within 20 steps (give_up: stop)"),
        (
            "stop_sev0",
            "the job is stopped unless its rules of SEV0 are clear within 20 steps "
            "(give_up: stop_sev0)",
        ),
    ],
)
def test_people_are_told_what_becomes_of_a_job_that_nothing_helps(give_up, text):
    assert Advice(None, describe_pending_stop(policy(give_up=give_up))).text == text


@pytest.mark.parametrize(
    ("relaunch", "text"),
    [
        (
            None,
            "for a relaunch: job.relaunch, which supervise init shows; then: supervise reload RUN",
        ),
        (
            RelaunchSettings(),
            "a relaunch is left; to see from where: supervise checkpoints RUN",
        ),
    ],
)
def test_people_are_told_what_is_left_where_the_ranks_cannot_act_together(relaunch, text):
    assert advise_relaunch_only(policy(job=JobSettings(relaunch=relaunch))).text == text


@pytest.mark.parametrize(
    ("verbs", "text"),
    [
        ((), "what was tried is taken back"),
        (("check_weights",), "the weights are tested, before soften"),
        (("verify",), "the effect of soften is verified"),
        (("reach", "verify"), "soften runs"),
    ],
)
def test_people_are_told_what_a_runbook_is_at(verbs, text):
    book = Runbook("soften", (), verbs)

    assert Advice(None, describe_runbook_progress(RunbookExecution(1, book, "SEV1"))).text == text
    assert describe_runbook_progress(None) == ()
