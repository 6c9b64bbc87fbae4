"""Mistakes and oddities of a policy, each told at its own line and column; most are in a golden."""

from __future__ import annotations

import pytest

from supervise.catalog import PolicyErrors, load_policy, shipped_folder
from supervise.core import fill_recipe
from supervise.core.model import PLACEHOLDERS

from .conftest import HEAD, ONE, pointed

HANG = HEAD + "use: [hang]\nbudgets: {all: {max: 3}, restart: {max: 2}}\n"
RELAUNCH = "job: {on_crash: restart, relaunch: "
MACHINE = """\
machine:
  any: {run: acting, hold: holding, exited: halted}
  launching: {first_frame: warming}
  warming: {ready: nominal}
  nominal: {notice: suspect}
  suspect: {clear: nominal}
  acting: {verified: probation}
  probation: {passed: nominal}
  holding: {released: warming}
"""


def with_rules(rules: str) -> str:
    return HEAD + ONE + "rules:\n" + rules


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
            with_rules("".join(f"  - {{id: {name}, when: a, sev: SEV2}}\n" for name in "rst"))
            + "inhibit:\n  - {by_rule: r, mute: [s]}\n  - {by_rule: s, mute: [t]}\n"
            "  - {by_rule: t, mute: [r]}\n",  # else which one acts would depend on their order
            "rules mute each other: ",
        ),
        (
            with_rules(
                "  - {id: r, when: a, sev: SEV2, run: hold}\n  - {id: s, when: a, sev: SEV2}\n"
            )
            + "inhibit: [{by_rule: s, mute: [¦r]}]\n",
            "s cannot mute r, which has a runbook",
        ),
    ],
    ids=["detectors", "inhibitions", "mute"],
)
def test_a_contradiction_is_one_mistake(mistakes, text, said):
    text, spots = pointed(text)

    [message] = mistakes(text)

    assert message.startswith("".join(spots)) and said in message


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
def test_a_place_inside_folded_text_is_found(mistakes, when, place):
    found = mistakes(with_rules(f"  - when: {when}\n    id: r\n    sev: SEV2\n"))

    assert found[0].startswith(place), found[0]


def test_a_mistake_of_an_override_is_reported_in_the_override(mistakes):
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
def test_a_pack_or_a_runbook_is_no_policy(kind):
    path = shipped_folder("policies") / f"{kind}.yaml"

    with pytest.raises(PolicyErrors, match=r"this is a (pack|runbook), not a policy"):
        load_policy(path)


@pytest.mark.parametrize(
    "line",
    [
        "job: {on_crash: page-with-evidence}",
        RELAUNCH + "{args: ['--resume={checkpoint}', '{directory}/{step}']}}",
        # Braces that are the job's own.
        RELAUNCH + """{args: ['--with={"a": 1}', '{}', '${now:%Y}', '${HOME}', '{{rank}}']}}""",
        "override:\n  hang.stalled: {grace: {eval: 30s, exiting: 10s}}",
        "planned: [{from: 10, to: 50, what: a new mix of data, expect: up}]",
        "notify: {heartbeat: {url_env: HC, every: 15s}}",
        MACHINE.replace("any: {", "any: {session_started: warming, "),
        MACHINE.replace("probation: {", "probation: {session_started: warming, "),
    ],
)
def test_what_has_a_meaning_gives_neither_an_error_nor_a_warning(load, line):
    warnings: list[object] = []

    load(f"{HANG}{line}\n", warnings=warnings)

    assert warnings == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "¦" + MACHINE + "  halted: {session_started: halted}",
            "machine: no state has a transition for 'session_started' (another training in "
            "the same launch would start in the state of the last one; "
            "add any: {session_started: warming})",
        ),
        (
            "notify: {heartbeat: {url_env: HC, every: ¦5s}}",
            "notify.heartbeat: a ping every 5 s: services refuse more than 5 a minute (every: 60s)",
        ),
        (
            "notify: {heartbeat: {url_env: HC, every: ¦2h}}",
            "notify.heartbeat: a ping every 7200 s: a dead run is noticed only after that"
            " (every: 60s)",
        ),
        (
            "approvals: {all: {timeout: ¦9m}}",
            "approvals.all: 540 s to answer is less than 10 min (timeout: 15m)",
        ),
    ],
)
def test_what_is_odd_is_a_warning(load, line, said):
    text, [spot] = pointed(f"{HANG}{line}\n")
    warnings: list[object] = []

    load(text, warnings=warnings)

    lines = [f"{w.line}:{w.col}: {w.message} ({w.hint})" for w in warnings]
    assert [line for line in lines if "never used" not in line] == [spot + said]


def test_every_placeholder_that_the_check_accepts_is_filled_in():
    text = "|".join(f"{{{name}}}" for name in PLACEHOLDERS)

    assert fill_recipe(text, "/a/b.pt", 41) == "/a/b.pt|/a|42"
