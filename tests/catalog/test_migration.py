"""Former names: what is known of them, and the rewriting of a policy that has them."""

from __future__ import annotations

from dataclasses import fields

from supervise.catalog.assembly import pack
from supervise.catalog.assembly.policy_loader import compose
from supervise.catalog.document.former_names import FORMER
from supervise.catalog.document.migration import migrate
from supervise.catalog.forms.file_forms import PolicyFile

OLD = """\
version: supervise/v1
use: [nonfinite, loss_spike, drift, throughput] # mine
standing_orders: {skip_nonfinite: {max: 3, per: 128}}
override:
  # noisy here
  drift.loss: {sev: SEV1, run: hold}
  loss_spike.notice: {sev: SEV2} # told
  throughput.mfu:
    sev: SEV1
  nonfinite.lasting: {cooldown: 300}
inhibit:
  - {by_rule: drift.rate, mute: [drift.update]}
  - by_state: [acting]
    mute: [drift.loss, loss_spike.notice, throughput.mfu]
detectors:
  two: {kind: join, any: [loss_spike.loss_out, loss_spike.news], within: 3}
rules:
  - {id: mine, when: two and loss_spike.pushed, sev: SEV2}
  - {id: other, when: drift.climbing, sev: SEV2}
"""
NEW = """\
version: supervise/v1
use: [nonfinite, loss_spike, throughput] # mine
safeguards: {skip_nonfinite: {max: 3, per: 128}}
override:
  # noisy here
  loss_spike.minor: {sev: SEV2} # told
  throughput.tokens:
    sev: SEV1
  nonfinite.sustained: {cooldown: 300}
inhibit:
  - by_state: [acting]
    mute: [loss_spike.minor]
detectors:
  two: {kind: join, any: [loss_spike.loss_log_z, loss_spike.exceeds_record], within: 3}
rules:
  - {id: mine, when: two and loss_spike.precursor, sev: SEV2}
  - {id: other, when: drift.climbing, sev: SEV2}
"""


def test_every_former_name_is_free_and_leads_to_one_of_today() -> None:
    draft = compose("observe")
    today = {rule.rule.id for rule in draft.rules} | {*draft.detectors}
    today |= {*pack.available(()), *(field.name for field in fields(PolicyFile))}

    assert {*FORMER} & today == set()
    assert {former.now for former in FORMER.values()} - today == {""}
    assert all(former.now or former.why for former in FORMER.values())


def test_names_change_where_they_are_written_and_comments_stay() -> None:
    found = migrate(OLD)

    assert found.text == NEW
    assert [line for line, _ in found.notes] == [2, 6, 8, 12, 14, 14, 19]
    assert (8, "override: throughput.tokens tells more than throughput.mfu did") in found.notes
    assert [what for _, what in found.lost] == [
        "rules of loss_spike ran rollback-and-rewarm; add harm to use for that",
        "drift.loss ran hold",
    ]
    assert migrate(NEW).text == NEW


def test_a_part_of_a_rule_mutes_and_removes_nothing_of_the_whole() -> None:
    """What muted or removed it would mute or remove what else the rule tells."""
    text = "extends: nano\nremove: [amp.scale, amp]\ninhibit: [{by_rule: data.top1, mute: [a]}]\n"

    assert migrate(text).text == "extends: nano\nremove: [amp]\n"
    assert migrate("use:\n- a\n- drift\n").text == "use:\n- a\n"
    assert migrate("use: []\nrules: []\n").text == "use: []\nrules: []\n"
