"""`supervise metrics`: every name has a meaning, and says who watches it."""

from __future__ import annotations

import json

from supervise.catalog import metrics, standard


def test_the_list_has_every_metric_once_with_its_unit(supervise):
    code, out, _ = supervise("metrics", "list", "--json")
    rows = json.loads(out)

    assert code == 0
    names = [row["id"] for row in rows]
    assert len(names) == len(set(names)) > 60
    assert all(row["unit"] and row["meaning"] and row["source"] for row in rows)
    assert {row["id"] for row in rows if row["measured"]} == set(metrics.known())


def test_what_a_collector_measures_is_not_listed_as_missing():
    """A metric moves from the standard ids to its collector the day it is measured."""
    assert not {spec.id for spec in standard.METRICS} & set(metrics.known())


def test_a_metric_is_explained_with_the_detectors_that_read_it(supervise):
    code, out, _ = supervise("metrics", "show", "train_loss_raw")

    assert code == 0
    assert "train_loss_raw [nat]" in out
    assert "loss_spike.loss_z: kind: robust_z" in out
    assert "loss(t) -> grad(t) -> update(t)" in out


def test_a_member_of_a_family_is_explained_under_its_own_name(supervise):
    code, out, _ = supervise("metrics", "show", "learning_rate.3", "--json")

    assert code == 0
    assert json.loads(out)["id"] == "learning_rate.3"
    assert json.loads(out)["measured"]


def test_a_wrong_id_gets_a_hint(supervise):
    code, out, err = supervise("metrics", "show", "grad_globl_norm")

    assert (code, out) == (64, "")
    assert "did you mean 'grad_global_norm'?" in err


def test_the_list_is_readable_without_json(supervise):
    code, out, _ = supervise("metrics", "list")

    assert code == 0
    assert out.index("measured by the probe") < out.index("step_time") < out.index("reported")
