"""`supervise policy diff`."""

from __future__ import annotations

import json

BASE = """\
version: supervise/v1
detectors: {a: {kind: threshold, metric: train_loss_raw, gt: 12}}
rules: [{id: r, when: a, sev: SEV1}]
"""


def test_a_difference_is_exit_1_with_both_values(supervise, tmp_path):
    (tmp_path / "a.yaml").write_text(BASE, "utf-8")
    (tmp_path / "b.yaml").write_text(BASE.replace("12", "20") + "probation: 7\n", "utf-8")
    assert supervise("policy", "diff", "nano", "nano") == (0, "the same\n", "")
    code, out, err = supervise("policy", "diff", tmp_path / "a.yaml", tmp_path / "b.yaml")

    assert (code, err) == (1, "")
    assert out == (
        "threshold loosened:\n  ~ detector a gt: 12.0 -> 20.0\nchanged:\n  ~ probation: 100 -> 7\n"
    )
    code, out, _ = supervise("policy", "diff", "--json", tmp_path / "a.yaml", tmp_path / "b.yaml")
    found = json.loads(out)
    assert (code, found["same"], len(found["changes"])) == (1, False, 2)
    assert found["changes"][0]["effect"] == "threshold loosened"
    assert found["a"]["digest"] != found["b"]["digest"]
