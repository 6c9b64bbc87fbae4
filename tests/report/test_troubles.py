"""Which incidents count."""

from dataclasses import replace

from supervise.core.model import RuleJoined
from supervise.report import closing_receipt, cost_warning, record_troubles
from tests.golden import stories


def test_the_end_of_a_run_says_what_the_probe_took_where_that_is_much(keep_run, make_frames):
    """Nobody is paged for it."""
    run = keep_run(make_frames(0, *[2.0] * 5))
    assert not any("the probe took" in line for line in closing_receipt(run))

    assert cost_warning(0.31, "RUN") == [
        "  the probe took 31 % of a step; its parts: supervise status RUN"
    ]
    assert cost_warning(0.04, "RUN") == cost_warning(None, "RUN") == []


def test_an_order_of_an_operator_is_no_incident_until_a_rule_joins_it():
    """It is an intervention; the receipt counts it as none."""
    records = stories.played("operator").records
    opened = next(r for r in records if r.kind == "incident")
    joining = RuleJoined(reason="", incident="inc-1", rule="spike", runbook="")
    joined = replace(opened, decision=joining)

    assert opened.reason == "SEV2 lr_scale requested by operator"
    assert record_troubles(records) == []
    assert record_troubles([*records, joined]) == ["inc-1"]
    assert record_troubles(stories.played("crash").records) == ["inc-1"]
