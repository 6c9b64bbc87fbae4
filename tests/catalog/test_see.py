"""What people are sent to read about a rule: found, checked, and never run."""

from __future__ import annotations

from collections.abc import Callable

from supervise.core.model.policy import Policy

HEAD = "version: supervise/v1\nmode: enforce\n"
HIGH = "detectors: {a: {kind: threshold, metric: train_loss_raw, gt: 12}}\n"
Loader = Callable[..., Policy]
Mistakes = Callable[..., list[str]]


def rule(keys: str) -> str:
    return f"{HEAD}{HIGH}rules: [{{id: r, when: a, {keys}}}]\n"


def test_it_is_what_the_rule_says_else_what_it_runs_else_its_severity(load: Loader) -> None:
    """Every rule leads somewhere."""
    assert load(rule("sev: SEV1, run: page-with-evidence, see: hang")).rules[0].see == "hang"
    assert load(rule("sev: SEV1, run: page-with-evidence")).rules[0].see == "page-with-evidence"
    assert load(rule("sev: SEV2")).rules[0].see == "sev2"
    assert load(rule("sev: SEV0, run: hold")).rules[0].see == "sev0"


def test_reading_needs_no_budget_and_no_savepoints(load: Loader) -> None:
    """A rollback that is only read about is not prepared for; nor when the copy is loaded."""
    policy = load(rule("sev: SEV1, see: soften"))

    assert {"soften", "rollback-and-rewarm"} <= set(policy.runbooks)
    assert load(policy.resolved).digest == policy.digest


def test_running_it_needs_them(mistakes: Mistakes) -> None:
    """The same runbook, run by another rule."""
    text = rule("sev: SEV1, see: soften")[:-2] + ", {id: q, when: a, sev: SEV1, run: soften}]\n"

    assert any("no budget 'lr_scale'" in said for said in mistakes(text))


def test_a_misspelt_one_is_told_at_its_place(mistakes: Mistakes) -> None:
    """With what was probably meant; and nobody can read about `hold`."""
    assert mistakes(rule("sev: SEV1, see: hnag")) == [
        "4:42: rule r: no runbook 'hnag' (did you mean 'hang'?)"
    ]
    assert mistakes(rule("sev: SEV1, see: hold")) == [
        "4:42: rule r: there is nothing to read about hold"
    ]


def test_a_runbook_tells_the_engine_everything_that_people_ask(load: Loader) -> None:
    """The parts of a page, by name."""
    book = load(rule("sev: SEV1, see: attention-logits")).runbooks["attention-logits"]

    assert "max_attn_logit" in book.handles
    assert book.evidence
    assert book.containment
    assert book.probe_replay
    assert book.over_when
    assert list(book.localize) == ["optimization", "model", "data", "hardware"]
