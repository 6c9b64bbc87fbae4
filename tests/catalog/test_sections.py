"""Sections of a policy with little in them: `planned`, `see`, `sampling`; and drills by words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from supervise.catalog import all_metrics, drill_facts, parse_drill
from supervise.core.model import Planned, Policy, Sampling, plain_json
from supervise.errors import PolicyError, UsageError
from supervise.runtime import probe_config
from supervise_probe.sampling.sample_sets import DEFAULTS

from .conftest import HEAD, ONE, Loader, Mistakes


def rule(keys: str = "sev: SEV1") -> str:
    return f"{HEAD}{ONE}rules: [{{id: r, when: a, {keys}}}]\n"


def planned(last: str) -> str:
    first = "{from: 1000, to: 1200, what: new data mix, expect: up}"
    return f"{rule()}planned:\n  - {first}\n  - {last}\n"


def test_announced_changes_arrive_and_come_out_again(load: Loader) -> None:
    """Steps, words and direction; the resolved text loads to the same policy."""
    policy = load(planned("{from: 5000, to: 5000, what: longer context}"))

    assert policy.planned == (
        Planned(1000, 1200, "new data mix", "up"),
        Planned(5000, 5000, "longer context", "either"),
    )
    assert load(policy.resolved).digest == policy.digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (planned("{from: 5, to: 4, what: x}"), "planned[1].to: comes before from: 5"),
        (planned("{from: 5, what: x}"), "planned[1] needs the key 'to'"),
        (planned("{from: 5, to: 6, waht: x}"), "did you mean 'what'"),
        (
            rule() + "budgets: {all: {max: 1001}}\n",
            "5:22: budgets.all.max should be at most 1000, not 1001",
        ),
        (rule("sev: SEV1, see: hnag"), "4:42: rule r: no runbook 'hnag' (did you mean 'hang'?)"),
        (rule("sev: SEV1, see: hold"), "4:42: rule r: there is nothing to read about hold"),
    ],
)
def test_a_mistake_is_named_with_what_was_meant(
    mistakes: Mistakes, text: str, message: str
) -> None:
    [said] = mistakes(text)

    assert message in said


def test_it_is_what_the_rule_says_else_what_it_runs_else_its_severity(load: Loader) -> None:
    assert load(rule("sev: SEV1, run: page-with-evidence, see: hang")).rules[0].see == "hang"
    assert load(rule("sev: SEV1, run: page-with-evidence")).rules[0].see == "page-with-evidence"
    assert load(rule("sev: SEV2")).rules[0].see == "sev2"
    assert load(rule("sev: SEV0, run: hold")).rules[0].see == "sev0"


def test_reading_needs_no_budget_and_no_savepoints(load: Loader) -> None:
    """A rollback that is only read about is not prepared for; nor when the copy is loaded."""
    policy = load(rule("sev: SEV1, see: hold-rate"))

    assert {"hold-rate", "rollback-and-rewarm"} <= set(policy.runbooks)
    assert load(policy.resolved).digest == policy.digest


def test_a_runbook_tells_the_engine_everything_that_people_ask(load: Loader) -> None:
    book = load(rule("sev: SEV1, see: attention-logits")).runbooks["attention-logits"]

    assert "max_attn_logit" in book.handles
    assert book.evidence
    assert book.containment
    assert book.probe_replay
    assert book.over_when
    assert list(book.localize) == ["optimization", "model", "data", "hardware"]


def test_intervals_of_samples_are_given_to_the_probe(load: Loader, tmp_path: Path) -> None:
    policy = load(rule() + "sampling: {attention: 100, routing: 0}\n")
    run = SimpleNamespace(id="r", marks_path=tmp_path, quarantine_path=tmp_path / "q")

    assert policy.sampling == Sampling(attention=100, routing=0)
    assert load(policy.resolved).digest == policy.digest
    sampling = {"attention": 100, "routing": 0, "share": 0.01}
    assert probe_config(run, tmp_path, policy, ())["sampling"] == sampling
    policy = load(rule() + "probe: {share: 0.5%}\n")
    assert probe_config(run, tmp_path, policy, ())["sampling"] == {"share": 0.005}
    for share in ("1", "0%", "101%", "1 %"):
        with pytest.raises(PolicyError, match="percentage"):
            load(f"{rule()}probe: {{share: {share}}}\n")
    assert load(rule()).sampling == Sampling()  # the probe has its own
    for name in DEFAULTS:
        assert load(f"{rule()}sampling: {{{name}: 3}}\n").sampling == Sampling(**{name: 3})


def test_a_drill_fills_in_its_parameters_and_may_name_a_rank():
    assert plain_json(parse_drill("moments:how=restart@9")) == {
        "fault": "moments",
        "step": 9,
        "params": {"how": "restart", "factor": 1e-4},
    }
    assert parse_drill("slow_input:rank=1@9").rank == 1


@pytest.mark.parametrize("text", ["slow_input:rank=x@9", "slow_input:rank@9", "_tokens@9"])
def test_what_is_no_drill_is_refused(text):
    with pytest.raises(UsageError, match=r"no parameter 'rank'|no fault '_tokens'"):
        parse_drill(text)


def test_a_drill_of_some_size_names_the_metric_that_it_moves() -> None:
    """How long it lasts, what it draws, which token and which signal are no size; a hang ends all
    frames."""
    for name, fault in drill_facts().items():
        sizes = {key for key, p in fault.parameters.items() if isinstance(p.default, (int, float))}
        if sizes - {"steps", "seed", "token", "signal"} and name != "hang":
            assert fault.moves in all_metrics(), name


def test_without_an_objective_the_height_of_a_loss_is_told_only(load: Loader, good: str) -> None:
    """What is harm, a spike or a drift is a notice; NaN and a bound of one's own stay."""
    text = good + "use: [harm, loss_spike, nonfinite, frozen]\n"
    text = text.replace("rollback", "") + "savepoints: {every: 25, keep: 4}\n"
    text = text.replace("max: 2, per: 5000}", "max: 2, per: 5000}, rollback: {max: 2, per: 5000}")
    acting, told = load(text), load(text + "objective: none\n")

    def of(policy: Policy) -> dict[str, tuple[str, str | None]]:
        return {rule.id: (rule.severity, rule.runbook) for rule in policy.rules}

    changed = {name for name, given in of(acting).items() if of(told)[name] != given}
    assert changed == {
        *("harm.established", "harm.early"),
        *(f"loss_spike.{name}" for name in ("coupled", "jump", "startup_spike", "ordered")),
    }
    assert {of(told)[name] for name in changed} == {("SEV2", None)}
    assert load(told.resolved).resolved == told.resolved
