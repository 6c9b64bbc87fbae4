"""Sections of a policy with little in them: `planned`, `see`, `sampling`; and drills by words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from supervise.catalog import all_metrics, drill_facts, parse_drill
from supervise.core.model import Planned, Sampling, plain_json
from supervise.errors import PolicyError, UsageError
from supervise.runtime import probe_config
from supervise_probe.sampling.sample_sets import DEFAULTS

from .conftest import GOOD, HEAD, ONE


def rule(keys: str = "sev: SEV1") -> str:
    return f"{HEAD}{ONE}rules: [{{id: r, when: a, {keys}}}]\n"


def test_announced_changes_arrive_and_come_out_again(load):
    policy = load(
        f"{rule()}planned:\n"
        "  - {from: 1000, to: 1200, what: new data mix, expect: up}\n"
        "  - {from: 5000, to: 5000, what: longer context}\n"
    )

    assert policy.planned == (
        Planned(1000, 1200, "new data mix", "up"),
        Planned(5000, 5000, "longer context", "either"),
    )
    assert load(policy.resolved).digest == policy.digest


def test_what_to_read_is_what_a_rule_names_else_what_it_runs_else_its_severity(load):
    assert load(rule("sev: SEV1, run: page-with-evidence, see: hang")).rules[0].see == "hang"
    assert load(rule("sev: SEV1, run: page-with-evidence")).rules[0].see == "page-with-evidence"
    assert load(rule("sev: SEV2")).rules[0].see == "sev2"
    assert load(rule("sev: SEV0, run: hold")).rules[0].see == "sev0"


def test_reading_needs_no_budget_and_no_savepoints(load):
    """A rollback that is only read about is not prepared for; nor when the copy is loaded."""
    policy = load(rule("sev: SEV1, see: hold-rate"))

    assert {"hold-rate", "rollback-and-rewarm"} <= set(policy.runbooks)
    assert load(policy.resolved).digest == policy.digest


def test_a_runbook_tells_the_engine_everything_that_people_ask(load):
    book = load(rule("sev: SEV1, see: attention-logits")).runbooks["attention-logits"]

    assert "max_attn_logit" in book.handles
    assert all((book.evidence, book.containment, book.probe_replay, book.over_when))
    assert list(book.localize) == ["optimization", "model", "data", "hardware"]


def test_intervals_of_samples_are_given_to_the_probe(load, tmp_path):
    policy = load(rule() + "sampling: {attention: 100, routing: 0}\nprobe: {share: 0.5%}\n")
    run = SimpleNamespace(id="r", marks_path=tmp_path, quarantine_path=tmp_path / "q")

    assert policy.sampling == Sampling(attention=100, routing=0)
    assert load(policy.resolved).digest == policy.digest
    sampling = {"attention": 100, "routing": 0, "share": 0.005}
    assert probe_config(run, tmp_path, policy, ())["sampling"] == sampling
    assert load(rule()).sampling == Sampling()  # the probe has its own
    for name in DEFAULTS:
        assert load(f"{rule()}sampling: {{{name}: 3}}\n").sampling == Sampling(**{name: 3})


@pytest.mark.parametrize(
    ("sections", "share"),
    [
        ("mechanisms: {}", 0.002),
        ("mechanisms: {share: 0.5%}", 0.001),
        ("mechanisms: {share: 100%}", 0.002),  # never more than what the probe may take
        ("mechanisms: {share: 100%}\nprobe: {share: 5%}", 0.01),
    ],
)
def test_copies_for_spectra_are_within_both_shares(load, tmp_path, sections, share):
    run = SimpleNamespace(id="r", marks_path=tmp_path, quarantine_path=tmp_path / "q")
    policy = load(f"{rule()}{sections}\n")
    pairs = probe_config(run, tmp_path, policy, ())["mechanisms"]
    assert pairs == {"every": 100, "distance": 25, "share": pytest.approx(share)}


@pytest.mark.parametrize("share", ["1", "0%", "101%", "1 %"])
def test_a_share_of_the_probe_is_a_percentage(load, share):
    with pytest.raises(PolicyError, match="percentage"):
        load(f"{rule()}probe: {{share: {share}}}\n")


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


def test_a_drill_of_some_size_names_the_metric_that_it_moves():
    """How long it lasts, what it draws, which token and which signal are no size; a hang ends all
    frames."""
    for name, fault in drill_facts().items():
        sizes = {key for key, p in fault.parameters.items() if isinstance(p.default, (int, float))}
        if sizes - {"steps", "seed", "token", "signal"} and name != "hang":
            assert fault.moves in all_metrics(), name


def test_without_an_objective_the_height_of_a_loss_is_told_only(load):
    """What is harm, a spike or a drift is a notice; NaN and a bound of one's own stay."""
    text = GOOD.replace("budgets: {", "budgets: {rollback: {max: 2}, ")
    text += "use: [harm, loss_spike, nonfinite, frozen]\nsavepoints: {every: 25, keep: 4}\n"
    acting, told = load(text), load(text + "objective: none\n")
    rules = {rule.id: (rule.severity, rule.runbook) for rule in told.rules}

    changed = {r.id for r in acting.rules if (r.severity, r.runbook) != rules[r.id]}
    assert changed == {
        *("harm.established", "harm.early"),
        *(f"loss_spike.{name}" for name in ("coupled", "jump", "startup_spike", "ordered")),
    }
    assert {rules[name] for name in changed} == {("SEV2", None)}
    assert load(told.resolved).resolved == told.resolved
