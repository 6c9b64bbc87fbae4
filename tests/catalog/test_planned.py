"""Announced changes in a policy file."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervise.catalog import load_policy
from supervise.catalog.document.diagnostics import PolicyErrors
from supervise.core.model.policy import Planned

TEXT = """\
version: supervise/v1
mode: observe
detectors: {{cap: {{kind: threshold, metric: train_loss_raw, gt: 9.0}}}}
rules: [{{id: high, when: cap, sev: SEV2}}]
planned:
  - {{from: 1000, to: 1200, what: "new data mix", expect: up}}
  - {last}
"""


def test_announced_changes_arrive_and_come_out_again(tmp_path: Path) -> None:
    """Steps, words and direction; the resolved text loads to the same policy."""
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT.format(last="{from: 5000, to: 5000, what: longer context}"), "utf-8")
    policy = load_policy(path)
    path.write_text(policy.resolved, "utf-8")

    assert policy.planned == (
        Planned(1000, 1200, "new data mix", "up"),
        Planned(5000, 5000, "longer context", "either"),
    )
    assert load_policy(path).digest == policy.digest


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("{from: 5, to: 4, what: x}", "planned[1].to: comes before from: 5"),
        ("{from: 5, what: x}", "planned[1] needs the key 'to'"),
        ("{from: 5, to: 6, what: x, expect: sideways}", "planned[1].expect"),
        ("{from: 5, to: 6, waht: x}", "did you mean 'what'"),
        ("{from: 30s, to: 6, what: x}", "planned[1].from"),
    ],
)
def test_a_mistake_in_one_is_named(tmp_path: Path, last: str, message: str) -> None:
    """Where it is, and what is meant."""
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT.format(last=last), "utf-8")
    with pytest.raises(PolicyErrors) as caught:
        load_policy(path)

    assert message in "\n".join(str(problem) for problem in caught.value.problems)
