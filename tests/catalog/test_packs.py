"""Every shipped pack proves itself by its own scenarios."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import yaml

from supervise.catalog import shipped

PACKS = {
    name: yaml.safe_load((shipped.folder("policies/packs") / f"{name}.yaml").read_text("utf-8"))
    for name in shipped.names("policies/packs")
}
SCENARIOS = [
    pytest.param(name, scenario, id=f"{name}: {scenario['name']}")
    for name, pack in PACKS.items()
    for scenario in pack["scenarios"]
]


@pytest.mark.parametrize(("pack", "scenario"), SCENARIOS)
def test_a_scenario_comes_out_as_it_says(
    pack: str,
    scenario: Mapping[str, Any],
    play: Callable[..., Mapping[str, list[tuple[int, bool]]]],
) -> None:
    """What a pack promises about a series is what the engine does with it."""
    changes = play(pack, scenario)

    for expected in scenario["expect"]:
        if "never" in expected:
            for rule in expected["never"]:
                assert changes[f"{pack}.{rule}"] == [], rule
            continue
        fired = [step for step, on in changes[f"{pack}.{expected['rule']}"] if on]
        assert fired, f"{expected['rule']} never fired"
        if "at" in expected:
            assert expected["at"] in fired
        elif "by" in expected:
            assert fired[0] <= expected["by"]
        else:
            first, last = expected["between"]
            assert first <= fired[0] <= last


@pytest.mark.parametrize("name", PACKS)
def test_a_pack_shows_both_trouble_and_quiet(name: str) -> None:
    """A pack has a scenario in which a rule fires, and says where its numbers come from."""
    expectations = [e for scenario in PACKS[name]["scenarios"] for e in scenario["expect"]]

    assert any("rule" in expected for expected in expectations)
    assert PACKS[name]["source"]
    assert PACKS[name]["false_alarms"]
