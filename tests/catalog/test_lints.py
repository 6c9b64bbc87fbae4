"""Every mistake that a policy can hold is named at its own line and column, all in one go."""

from __future__ import annotations

import pytest

from supervise.catalog import PolicyErrors, load_policy, shipped_folder

from .conftest import HEAD, ONE, Loader, Mistakes, pointed


def test_the_good_policy_is_good(good: str, load: Loader) -> None:
    warnings: list[object] = []
    load(good, warnings=warnings)  # raises what it has to say
    assert warnings == []


def written(rules: str) -> str:
    return HEAD + ONE + "rules:\n" + rules


MUTED = (
    "  - {id: r, when: a, %s}\n  - {id: s, when: a, sev: SEV2}\n"
    "inhibit: [{by_rule: s, mute: [¦r]}]\n"
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            HEAD + "detectors:\n"
            "  a: ¦{kind: join, any: [b], within: 1}\n"
            "  b: {kind: join, any: [c], within: 1}\n"
            "  c: {kind: sequence, steps: [a, d]}\n"
            "  d: {kind: nonfinite}\n",
            "detectors read each other: a -> b -> c -> a",
        ),
        (
            written("".join(f"  - {{id: {name}, when: a, sev: SEV2}}\n" for name in "rst"))
            + "inhibit:\n  - {by_rule: r, mute: [s]}\n  - {by_rule: s, mute: [t]}\n"
            "  - {by_rule: t, mute: [r]}\n",  # else which one acts would depend on their order
            "rules mute each other: ",
        ),
        (written(MUTED % "sev: SEV1"), "s cannot mute r, which is more severe"),
        (written(MUTED % "sev: SEV2, run: hold"), "s cannot mute r, which has a runbook"),
        (
            written("  - {id: r, when: a, sev: SEV1, run: ¦rollback-and-rewarm}\n")
            + "budgets: {all: {max: 1}, rollback: {max: 1}}\n",
            "rollback-and-rewarm rolls back, but no savepoints are kept; "
            "rule r runs rollback-and-rewarm (add savepoints: {every: 25, keep: 4})",
        ),
    ],
)
def test_what_contradicts_itself_is_one_mistake(mistakes: Mistakes, text: str, said: str) -> None:
    text, spots = pointed(text)

    [found] = mistakes(text)

    assert found.startswith("".join(spots)) and said in found


@pytest.mark.parametrize(
    ("when", "place"),
    [
        ('"a or (b"', "5:17"),
        ('"a or b"', "5:17"),
        ("a or\n      b", "6:7"),
        (">\n      a or\n\n      b", "8:7"),
        ("|\n      a\n      or b", "7:10"),
        ("'a\n      or b'", "6:10"),
    ],
)
def test_a_place_inside_folded_text_is_found(mistakes: Mistakes, when: str, place: str) -> None:
    found = mistakes(written(f"  - when: {when}\n    id: r\n    sev: SEV2\n"))

    assert found[0].startswith(place), found[0]


def test_a_mistake_of_an_override_is_reported_in_the_override(mistakes: Mistakes) -> None:
    """The pack is right; the line to change is the policy's."""
    found = mistakes(
        HEAD + "use: [loss_spike, hang]\noverride:\n"
        "  loss_spike.loss_z: {gt: 2.5}\n"
        "  loss_spike.grad_z: {gtt: 9}\n"
        "  loss_spike.coupled: {when: spike or spke, run: nix}\n"
        "  loss_spike.los_z: {gt: 1}\n"
        "  hang.stalled: {kind: nonfinite}\n"
        "  hang.stuck: 3\n"
        "savepoints: {every: 9}\nbudgets: {all: {max: 1}, rollback: {max: 1}}\n"
    )

    assert [line.partition(" (")[0] for line in found] == [
        "5:27: loss_spike.loss_z.clear: must be above 0 and below `gt`",
        "6:23: loss_spike.grad_z has no key 'gtt'",
        "7:39: unknown detector 'spke'",
        "7:50: rule loss_spike.coupled: no runbook 'nix'",
        "8:21: override of 'loss_spike.los_z': no pack in use has it",
        "9:18: 'kind' cannot be overridden",
        "10:15: override of 'hang.stuck' should be a mapping, not the number 3",
    ]


@pytest.mark.parametrize("kind", ["packs/hang", "../runbooks/soften"])
def test_a_pack_or_a_runbook_is_no_policy(kind: str) -> None:
    """The message says what it is and how it is used."""
    path = shipped_folder("policies") / f"{kind}.yaml"

    with pytest.raises(PolicyErrors, match=r"this is a (pack|runbook), not a policy"):
        load_policy(path)
