"""What holds for every action."""

from __future__ import annotations

import dataclasses
import inspect
import typing

import pytest

from supervise.catalog import action_classes
from supervise.errors import ActionError
from supervise_probe.ipc.fences import FENCED

NEEDED = {"lr_scale": {"set": 0.5}, "clip": {"factor": 0.3}}
ANSWERS = {
    "pause": {"paused_step": 153},
    "resume": {"resumed": True, "held_s": 1.0},
    "snapshot": {"path": "p", "sha256": "0" * 64, "bytes": 9, "files": []},
    "savepoint": {"step": 153, "bytes": 9},
    "lr_scale": {"lr_scale": 0.5, "learning_rate_before": 1e-3},
    "hold_rate": {"rate_limit": 1e-3, "groups": 2},
    "rollback": {"step": 125, "attempt": 1, "from_step": 153, "bytes": 9, "not_restored": []},
    "relaunch": {"pid": 9, "attempt": 1, "checkpoint": "ckpt-2", "how": "term", "moved": []},
    "skip_step": {"will_skip": 1},
    "clip": {"clip_bound": 0.3, "steps": 500},
    "update_clip": {"update_clip": {"window": 128, "sigma": 2.0}, "bytes": 9},
    "loss_scale": {"loss_scale": 65536.0, "backoff": 0.5},
    "raise_sampling": {"sampling": {"attention": 5}, "raised": ["attention"], "steps": 200},
    "profile": {"path": "incidents/inc-1/profile-154-rank-0.json", "first_step": 154, "steps": 5},
    "stop": {"how": "interrupt", "returncode": 0, "survivors": []},
}


CATALOG = action_classes()


def test_these_are_the_verbs():
    verbs = "lr_scale notify pause relaunch resume rollback savepoint skip_step snapshot"
    verbs += " stop verify quarantine unquarantine checkpoint undo hold"
    verbs += " clip loss_scale profile raise_sampling update_clip check_weights hold_rate"

    assert sorted(CATALOG) == sorted(verbs.split())


@pytest.mark.parametrize("verb", CATALOG)
def test_it_says_what_it_does_and_how_to_take_it_back(verb):
    page = inspect.getdoc(CATALOG[verb])

    assert all(heading in page for heading in ("Example:\n", "Undo: ", "Source: "))
    assert f"- {verb}" in page


@pytest.mark.parametrize("verb", CATALOG)
def test_whole_numbers_of_an_action_count_steps(verb):
    """Every int is marked as steps, for the loader."""
    hints = typing.get_type_hints(CATALOG[verb], include_extras=True)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(CATALOG[verb])}

    assert int not in fields.values()


@pytest.mark.parametrize("verb", CATALOG)
def test_its_defaults_can_work(verb):
    assert CATALOG[verb](**NEEDED.get(verb, {})).check() == []


@pytest.mark.parametrize("verb", [verb for verb in FENCED if verb in CATALOG])
def test_with_several_ranks_all_change_at_one_step(verb, context):
    """It is planned as with one; `fencing` carries it out."""
    CATALOG[verb](**NEEDED.get(verb, {})).plan(context(world_size=4))

    assert CATALOG[verb].changes_training


@pytest.mark.parametrize(
    "verb", ["relaunch", "resume", "snapshot", "stop", "raise_sampling", "profile"]
)
def test_what_harms_no_rank_works_with_several(verb, context):
    CATALOG[verb]().plan(context(world_size=4))

    assert not CATALOG[verb].changes_training


@pytest.mark.parametrize("verb", ANSWERS)
def test_it_returns_what_was_observed(verb, context, fake_job):
    """One call to the job, with the aimed arguments, and its answer as the result."""
    action = CATALOG[verb](**NEEDED.get(verb, {}))
    job = fake_job(ANSWERS[verb])
    args = action.plan(context())

    assert action.perform(job, args, key="k") == ANSWERS[verb]
    assert len(job.calls) == 1
    assert job.calls[0][0] == verb


@pytest.mark.parametrize("verb", ANSWERS)
def test_an_answer_without_an_effect_is_a_failure(verb, context, fake_job):
    action = CATALOG[verb](**NEEDED.get(verb, {}))

    with pytest.raises(ActionError):
        action.perform(fake_job({}), action.plan(context()), key="k")


@pytest.mark.parametrize("verb", ANSWERS)
def test_a_refusal_of_the_probe_is_passed_on(verb, context, fake_job):
    action = CATALOG[verb](**NEEDED.get(verb, {}))
    refusal = ActionError("rank 0 refused", retryable=False)

    with pytest.raises(ActionError) as caught:
        action.perform(fake_job(refusal), action.plan(context()), key="k")

    assert caught.value is refusal


def test_zero_actions_means_nothing_that_touches_the_job():
    free = {verb for verb, action in CATALOG.items() if not action.touches_job}

    assert free == {
        *("snapshot", "hold", "notify", "verify", "raise_sampling", "profile", "check_weights"),
    }
    assert {verb for verb, action in CATALOG.items() if action.destructive} == {
        "quarantine",
        "relaunch",
        "rollback",
        "skip_step",
        "stop",
    }
    assert {verb for verb, action in CATALOG.items() if action.engine_step} == {
        "hold",
        "notify",
        "undo",
        "verify",
    }
