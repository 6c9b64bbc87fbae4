"""Which incidents count."""

from supervise.report import receipt
from supervise.report.records import troubles

from . import stories


def test_an_order_of_an_operator_is_no_incident_until_a_rule_joins_it():
    """It is an intervention; the receipt counts it as none."""
    _, records, _ = stories.played("operator")
    opened = next(r for r in records if r["kind"] == "incident")
    joined = opened | {"rule": "spike", "data": {"what": "joined"}}

    assert opened["reason"] == "SEV2 lr_scale requested by operator"
    assert troubles(records) == [] and receipt.outcome(records)["incidents"] == 0
    assert troubles([*records, joined]) == ["inc-1"]
    assert troubles(stories.played("crash")[1]) == ["inc-1"]
