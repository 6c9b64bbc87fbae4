"""A change of structure changes nothing that users or auditors see."""

import itertools
import re

import pytest
from msgspec import structs

from supervise.core import NOTICES

from . import frozen
from .notices import FACTS

SAME_AS_LARGE = "decisions/tests-moe.txt"  # its decisions, too: once in the suite is enough
# Seconds each, of what the other packs and the stories of `nano` go through as well: not in the
# unit lane.
LONG = {
    f"decisions/{name}.txt"
    for name in (
        "packs-attention",
        "packs-loss_spike",
        "packs-routing",
        "packs-throughput",
        "packs-update_scale",
        "tests-large",
        "tests-medium",
        "tests-nano",
    )
}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            marks=[pytest.mark.slow] * (frozen.name_of(path) in LONG)
            + [pytest.mark.chaos] * (frozen.name_of(path) == SAME_AS_LARGE),
        )
        for path in frozen.FILES
    ],
    ids=frozen.name_of,
)
def test_scenarios_pass_and_come_to_the_same_decisions(path):
    text, failures = frozen.decisions(path)

    assert failures == []
    assert text.splitlines() == (frozen.HERE / frozen.name_of(path)).read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run", frozen.run),
        ("messages", frozen.messages),
        ("notices", frozen.notices),
        ("mistakes", frozen.mistakes),
        ("channels", frozen.channels),
        pytest.param("help", frozen.helps, marks=pytest.mark.slow),  # in a process of its own
        ("exit-codes", frozen.exit_codes),
    ],
)
def test_what_users_read_is_the_same(name, text):
    assert text().splitlines() == (frozen.HERE / f"{name}.txt").read_text().splitlines()


IN_PROSE = re.compile(r"supervise [a-z]+ RUN")  # a command
UNFINISHED = re.compile(r"^[ ;:]|[ ;:]$|  |: ?;|; ;| \(\)|None|[{}]| -1\b")


def test_a_text_is_whole_without_the_facts_that_may_be_missing():
    texts = []
    for form, incident in itertools.product(NOTICES.values(), ("", "inc-1")):
        required = {field.name for field in structs.fields(form) if field.required}
        facts = FACTS | {"severity": "SEV1", "incident": incident}
        given = {name: facts[name] for name in required | {"severity", "incident"}}
        notice = form(**given)
        begun = {"step": -1} if "step" in form.__struct_fields__ else {}  # no step was made yet
        assert notice.title and notice.next.text and form(**given | begun).title, form
        parts = (notice.title, notice.verdict, notice.reason, notice.next.text)
        texts += [(form.__name__, text) for text in parts]
        assert not any(IN_PROSE.search(step.text) for step in notice.next.whole), form

    assert [(form, text) for form, text in texts if UNFINISHED.search(text)] == []
