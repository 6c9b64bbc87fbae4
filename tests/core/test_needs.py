"""Which rules a job can have, by the metrics it has."""

from __future__ import annotations

import pytest

from supervise.catalog import load_policy
from supervise.core.detection import rule_inputs

POLICY = """\
version: supervise/v1
mode: observe
detectors:
  a: {kind: threshold, metric: a, gt: 1.0}
  b: {kind: threshold, metric: b, gt: 1.0}
  either: {kind: join, any: [a, b], within: 2}
  both: {kind: join, all: [a, b], within: 2}
  chain: {kind: sequence, steps: [a, b], within: 2}
  bad: {kind: nonfinite, metrics: [a, b]}
  same: {kind: equal, metric: a, with: b}
  hang: {kind: absence, signal: step, after: {min: 60s}}
rules:
  - {id: or, when: a or b, sev: SEV2}
  - {id: and, when: a and b, sev: SEV2}
  - {id: but, when: a and not b, sev: SEV2}
  - {id: either, when: either, sev: SEV2}
  - {id: both, when: both, sev: SEV2}
  - {id: chain, when: chain, sev: SEV2}
  - {id: bad, when: bad, sev: SEV2}
  - {id: same, when: same, sev: SEV2}
  - {id: hang, when: hang, sev: SEV2}
"""
CAN = {
    (): {"hang"},
    ("a",): {"or", "either", "bad", "hang"},
    ("b",): {"or", "either", "bad", "hang"},
    ("a", "b"): {"or", "and", "but", "either", "both", "chain", "bad", "same", "hang"},
}


@pytest.mark.parametrize("there", CAN, ids=str)
def test_a_rule_can_fire_if_some_readings_of_what_is_there_make_it_true(there, tmp_path):
    (tmp_path / "p.yaml").write_text(POLICY)
    policy = load_policy(tmp_path / "p.yaml")

    found = {r.id for r in policy.rules if rule_inputs.can_fire(policy, r, there.__contains__)}

    assert found == CAN[there]
