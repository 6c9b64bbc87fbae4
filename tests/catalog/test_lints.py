"""Every mistake that a policy can hold is named at its own line and column, all in one go."""

from __future__ import annotations

import pytest

from supervise.catalog import PolicyErrors, load_policy, shipped_folder

from .conftest import HEAD, ONE, Loader, Mistakes, pointed

# What is put in the place of what, in the good policy, and what is said about it.
CHANGES = [
    ("mode: enforce", "¦moed: enforce", "the file has no key 'moed' (did you mean 'mode'?)"),
    ("version: supervise/v1\n", "¦", "the file needs the key 'version'"),
    ("supervise/v1", "¦supervise/v2", "supervise/v2 is newer than this program, which knows"),
    ("mode: enforce", "mode: ¦enforced", "mode should be one of 'observe', 'shadow', 'approve'"),
    ("mode: enforce", "approvals: {¦clam: {}}", "approvals: no action and no runbook 'clam'"),
    ("mode: enforce", "job: {on_crash: ¦clam}", "job.on_crash: no runbook 'clam' (did you mean"),
    ("mode: enforce", "job: {on_crash: ¦hold}", "a job that has ended cannot be held"),
    ("mode: enforce", "use: [hang, ¦hang]", "the pack 'hang' is used twice"),
    ("gt: 12.0", "gt: ¦12s", "high.gt should be a number, not the text '12s' (it has no unit)"),
    (
        "mode: enforce",
        "hold_reminder: ¦30",
        "hold_reminder is a time and needs a unit (write 30s, 30m)",
    ),
    (
        "mode: enforce",
        "baseline: {window: 10, min: ¦11}",
        "baseline.min: is larger than the window of 10",
    ),
    (
        "kind: threshold",
        "kind: ¦treshold",
        "high.kind: no kind of detector 'treshold'",
    ),
    (
        "kind: threshold, metric: t",
        "metric: t",
        "4:9: high needs the key 'kind' (one of",
    ),
    ("metric: train_loss_raw", "metric: ¦''", "high: '' is no name of a metric (a letter or _"),
    (
        "run: calm",
        "run: ¦rollback",
        "rule spike: no runbook 'rollback' (did you mean 'rollback-and",
    ),
    (
        "mode: enforce",
        "notify: {heartbeat: {url_env: HC, every: ¦0s}}",
        "notify.heartbeat.every: must be above zero, not 0",
    ),
    (
        "mode: enforce",
        "notify: {page: {url: ¦'https://a.example/?token=x'}}",
        "notify.page.url: holds more than an address",
    ),
    ("gt: 12.0", "gte: ¦1, gt: 12.0", "high.gte: give exactly one of"),
    ("gt: 12.0", "gt: 12.0, clear: ¦13", "high.clear: "),
    ("gt: 12.0", "gt: 12.0, m_of_n: ¦[5, 3]", "high.m_of_n: "),
    ("gt: 12.0", "gt: 12.0, ¦metric: x", "duplicate key 'metric'"),
    ("wild:", "not:", "5:8: 'not' is a reserved word"),
    ("when: high and wild", "when: high and ¦wid", "unknown detector 'wid' (did you mean 'wild'?)"),
    ("when: high and wild", "when: ¦(high", "rule spike: this parenthesis is never closed"),
    ("id: dead", "id: ¦spike", "there is a rule 'spike' already (first in"),
    ("sev: SEV0", "sev: ¦sev0", "rule dead.sev should be one of 'SEV0', 'SEV1', 'SEV2', not the"),
    ("[snapshot, {lr", "[¦{rollback: {at_least: 1}}, {lr", "runbook calm: rollback without"),
    ("[snapshot, {lr", "[¦pause, snapshot, {lr", "runbook calm: pause without resume (put"),
    (", verify]", "]", "10:20: runbook calm: touches the job and does not verify (end with verify"),
    (
        "[snapshot, {lr_scale: {set: 0.5}}, verify]",
        "{steps: [snapshot, {lr_scale: {set: 0.5}}, verify], if_refused: ¦calm}",
        "runbook calm: if_refused leads back to it: calm -> calm",
    ),
    ("[snapshot, {lr", "[¦verify, {lr", "runbook calm: verify is the last step of a runbook"),
    ("[snapshot, {lr", "[snapshot, stop, ¦{lr", "runbook calm: nothing can be done after stop"),
    ("[snapshot, {lr", "[snapshot, ¦hold, {lr", "runbook calm: hold is the last step of a runbook"),
    (", verify]", ", hold]", "10:44: runbook calm: touches the job and does not verify"),
    (
        "[snapshot, {lr_scale: {set: 0.5}}, verify]",
        "{steps: [snapshot, hold], if_it_fails: ¦sev0}",
        "runbook calm: it holds, whatever fails before that (leave if_it_fails out)",
    ),
    (
        "mode: enforce",
        "escalate: {ladder: [¦hold-for-config, calm]}",
        "no level can follow hold, which hold-for-config ends in (make it the last level)",
    ),
    ("mode: enforce", "job: {on_crash: ¦hold-for-config}", "a job that has ended cannot be held"),
    ("calm: [snapshot, {lr_scale: {set: 0.5}}, verify]", "calm: ¦[]", "runbook calm: has no"),
    ("set: 0.5", "set: ¦2", "runbook calm.steps[1].lr_scale.set: must be above 0"),
    ("{lr_scale: {set: 0.5}}", "¦lr_scale", "runbook calm.steps[1].lr_scale needs the key"),
    (
        "{lr_scale: {set: 0.5}}",
        "¦{pause: , resume: }",
        "runbook calm.steps[1] should hold 1 key",
    ),
    (
        "  calm:",
        "  ¦Calm: [notify]\n  calm:",
        "a name in runbooks should be a runbook's name, in lower case, such as",
    ),
    (", lr_scale: {max: 2, per: 5000}", "", "11:10: no budget 'lr_scale', which lr_scale in calm"),
    (
        "all: {max: 6}, ",
        "",
        "11:10: no budget 'all', which lr_scale in calm needs; rule spike runs",
    ),
    ("mode: enforce", "escalate: {ladder: [calm, ¦nix]}", "ladder: no runbook 'nix' (known:"),
    ("mode: enforce", "escalate: {ladder: [¦hold, calm]}", "no level can follow hold (make it"),
    (
        "mode: enforce",
        "escalate: {ladder: [calm, ¦calm]}",
        "'calm' is in the ladder twice",
    ),
    ("mode: enforce", "inhibit: [{by_rule: dead, mute: [¦dead]}]", "dead would mute itself"),
    ("mode: enforce", "inhibit: [{by_rule: spike, mute: [¦dead]}]", "dead is SEV0, which cannot"),
    ("mode: enforce", "inhibit: [¦{mute: [spike]}]", "inhibit needs one of 'by_rule' and"),
    ("mode: enforce", "inhibit: [¦{by_rule: dead, mute: []}]", "inhibit mutes nothing"),
    ("sev: SEV0", "sev: SEV0, phases: {¦earl: off}", "rule dead.phases has no key 'earl' (did"),
    ("sev: SEV0", "sev: SEV0, phases: {late: ¦SEV3}", "rule dead.phases.late should be one of"),
    (
        "sev: SEV0",
        "sev: SEV1, phases: {late: SEV0}}\ninhibit:\n  - {by_rule: spike, mute: [¦dead]",
        "dead is SEV0, which cannot be muted",
    ),
    (
        "sev: SEV0",
        "sev: SEV1, phases: {early: off}}\ninhibit:\n  - {by_rule: dead, mute: [¦spike]",
        "dead cannot mute spike, which is more severe in phase early",
    ),
    (
        "mode: enforce",
        "notify: {webhook: {url_env: U, allow_http: ¦maybe}}",
        "notify.webhook.allow_http should be true or false",
    ),
    ("mode: enforce", "use: ¦hang", "use should be a list, each item a name of letters"),
    ("mode: enforce", "notify: {¦slak: {}}", "notify: no notifier 'slak' (did you mean 'slack'"),
    ("mode: enforce", "notify: {slack: {¦url: x}}", "notify.slack has no key 'url' (did you"),
    ("mode: enforce", "machine: ¦{any: {exited: halted}}", "machine: 'acting' can never be reac"),
    ("  calm:", "  hold: ¦[notify]\n  calm:", "'hold' is reserved: it waits for a person"),
]


@pytest.mark.parametrize(
    ("old", "new", "said"), CHANGES, ids=[f"{n} {new}" for n, (_, new, _) in enumerate(CHANGES)]
)
def test_one_mistake_is_named_where_it_stands(
    good: str, mistakes: Mistakes, old: str, new: str, said: str
) -> None:
    """One message is about what was changed, at the very place where it was changed."""
    assert old in good
    text, spots = pointed(good.replace(old, new, 1))

    found = mistakes(text)

    assert any(line.startswith("".join([*spots, said])) for line in found), found


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


FILES = {
    "packs/hang.yaml": HEAD + "use: [hang]\n",
    "runbooks/soften.yaml": HEAD
    + ONE
    + "rules: [{id: r, when: a, sev: SEV1, run: soften}]\nsavepoints: {every: 9}\n"
    "budgets: {all: {max: 1}, lr_scale: {max: 1}, rollback: {max: 1}}\n",
}
HANG, SOFTEN = FILES


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (HANG, "pack: hang", "pack: hung", "pack 'hung' is in a file named hang.yaml"),
        (
            HANG,
            "when: stalled",
            "when: gone",
            "unknown detector 'gone' (known: 'dead', 'erring', 'looping', 'missing', 'stalled', ",
        ),
        (
            HANG,
            "id: stuck",
            "id: stalled",
            "a detector is named 'stalled' too; overrides need one name",
        ),
        (HANG, "min: 120s", "min: 120", "hang.stalled.after.min is a time and needs a unit"),
        (
            HANG,
            "p99_multiple: 8",
            "p99_multiple: 8s",
            "hang.stalled.after.p99_multiple should be a number",
        ),
        (
            HANG,
            "run: stop-and-page",
            "run: stop-and-pag",
            "no runbook 'stop-and-pag' (did you",
        ),
        (SOFTEN, "runbook: soften", "runbook: softer", "runbook 'softer' is in a file named"),
        (
            SOFTEN,
            "  - snapshot\n",
            "  - snapshto\n",
            "steps[0]: no action 'snapshto' (did you",
        ),
        (SOFTEN, "verify: {", "verfy: {", "the file has no key 'verfy' (did you mean 'verify'?)"),
        (
            SOFTEN,
            "within: 200",
            "within: 5",
            "verify.within: must be at least clear_for (20",
        ),
        (SOFTEN, "  - snapshot\n", "  - snapshot\n  - verify\n", "runbook soften verifies twice"),
        (SOFTEN, "if_it_fails: h", "if_it_fails: x", "if_it_fails: no runbook 'xold'"),
        (SOFTEN, "meaning: Pr", "meaning: oops: Pr", "put quotes around text that holds ': '"),
    ],
)
def test_a_mistake_in_a_pack_or_runbook_is_reported_there(
    mistakes: Mistakes, file: str, old: str, new: str, said: str
) -> None:
    """With its own file's line, whichever policy uses it."""
    folder, _, name = file.partition("/")
    shipped = shipped_folder("policies/packs" if folder == "packs" else folder) / name
    text = shipped.read_text("utf-8")
    assert old in text

    found = mistakes(FILES[file], {file: text.replace(old, new, 1)})

    assert any(said in line for line in found), found


@pytest.mark.parametrize("kind", ["packs/hang", "../runbooks/soften"])
def test_a_pack_or_a_runbook_is_no_policy(kind: str) -> None:
    """The message says what it is and how it is used."""
    path = shipped_folder("policies") / f"{kind}.yaml"

    with pytest.raises(PolicyErrors, match=r"this is a (pack|runbook), not a policy"):
        load_policy(path)
