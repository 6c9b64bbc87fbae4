"""Each action by what only it promises."""

from __future__ import annotations

import dataclasses
import inspect
import typing

import pytest

from supervise.actions import (
    Checkpoint,
    CheckWeights,
    Clip,
    HoldRate,
    LossScale,
    LrScale,
    Pause,
    Profile,
    Quarantine,
    RaiseSampling,
    Relaunch,
    Resume,
    Rollback,
    SkipStep,
    Stop,
    Unquarantine,
    UpdateClip,
    Verify,
)
from supervise.catalog import action_classes
from supervise.core.model import EffectCheck, Payload, Refused
from supervise.errors import ActionError
from supervise_probe.ipc.fences import FENCED
from tests.support.recorded_run import shipped_policy

CATALOG = action_classes()
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


def check(args, result, frame, step):
    return EffectCheck(Payload(args), Payload(result), frame, step, 0)


def test_the_lease_goes_to_the_probe_in_seconds(context, fake_job):
    job = fake_job({"paused_step": 153})
    action = Pause(lease=60.0)

    action.perform(job, action.plan(context()), key="k")

    assert job.calls == [("pause", {"lease_s": 60.0}, "k")]


def test_the_target_is_absolute(context, fake_job):
    """Asked twice for 0.5 it is 0.5."""
    job = fake_job({"lr_scale": 0.5})
    action = LrScale(set=0.5, rewarm=200)

    for key in ("a", "b"):
        action.perform(job, action.plan(context()), key=key)

    assert [args for _, args, _ in job.calls] == [{"value": 0.5, "rewarm_steps": 200}] * 2


RULE = {"window": 128, "sigma": 3.0}
HELD = {"generation": 3, "held": 3, "entries": 4, "ranks": 1}


@pytest.mark.parametrize(
    ("action", "answer", "said"),
    [
        *(
            (
                LrScale(set=0.5),
                {"lr_scale": seen},
                "asked for a learning rate scale of 0.5, the job",
            )
            for seen in (1.0, 0.25, None, "0.5")
        ),
        *(
            (Clip(max_norm=0.5), {"clip_bound": x}, "clip")
            for x in (0.6, None, "0.5", float("inf"))
        ),
        (Clip(lift=True), {"clip_bound": 0.5}, "to be lifted, and the job has"),
        (UpdateClip(sigma=3.0), {"update_clip": None}, "an update clip of"),
        (
            UpdateClip(sigma=3.0),
            {"update_clip": {**RULE, "sigma": 2.0}},
            "asked for an update clip",
        ),
        (UpdateClip(lift=True), {"update_clip": RULE}, "update clip"),
        (LossScale(set=1024.0), {"loss_scale": 64.0}, "asked for a loss scale of 1024"),
        (Stop(), {"how": "kill", "returncode": -9, "survivors": [77]}, "still alive after KILL"),
        (SkipStep(count=2), {"will_skip": 1}, "asked to skip 2 steps"),
        (Checkpoint(), {"path": "x"}, "scheduled no checkpoint"),
        *(
            (
                Rollback(),
                {"step": at, "attempt": 1},
                f"at step {at} after a rollback to before step",
            )
            for at in (140, 153, None)
        ),
        (Relaunch(), {**ANSWERS["relaunch"], "attempt": 2}, "was not restarted"),
        (
            Quarantine(shards="none", positions="breach"),
            {**HELD, "held": 2},
            "holds generation 2 of the quarantine, not 3",
        ),
    ],
    ids=str,
)
def test_an_answer_that_is_not_what_was_asked_for_is_a_failure(
    action, answer, said, context, fake_job
):
    with pytest.raises(ActionError, match=said):
        action.perform(fake_job(answer), action.plan(context(batches=(17,))), key="k")


@pytest.mark.parametrize(
    ("frame", "shows"),
    [
        ({"learning_rate": 0.1, "learning_rate_scheduled": 3.0, "lr_hold": 1 / 30}, True),
        ({"learning_rate": 3.0, "learning_rate_scheduled": 3.0, "lr_hold": 1.0}, True),  # is back
        ({"learning_rate": 3.0, "learning_rate_scheduled": 3.0}, False),
        ({"learning_rate": 3.0, "learning_rate_scheduled": 0.1, "lr_hold": 1.0}, False),  # a drill
        ({}, True),
    ],
)
def test_a_rate_is_held_where_the_frame_shows_it(frame, shows, context):
    action = HoldRate()
    args, done = action.plan(context()), {"rate_limit": 0.1, "groups": 1}
    frame["lr_scale"] = frame.get("lr_hold", 1.0)

    found = action.effect(check(args, done, frame, 154))

    assert found is None if shows else "not at most 0.1" in found


def test_a_factor_is_resolved_by_the_job_and_seen_in_the_frame(context, fake_job):
    """The supervisor does not know the job's own clip; the answer is the absolute bound."""
    action = Clip(factor=0.3)
    args = action.plan(context())
    seen = action.perform(fake_job({"clip_bound": 0.15}), args, key="k")

    assert args == {"max_norm": None, "factor": 0.3, "steps": 500}
    assert action.effect(check(args, seen, {"clip_bound": 0.15}, 9)) is None
    assert action.effect(check(args, seen, {}, 9)) is None
    assert action.effect(check(args, seen, {"clip_bound": 0.5}, 9)) == (
        "the gradient norm is clipped to 0.5, not 0.15"
    )


def test_a_bound_that_is_lifted_shows_in_the_frame(context, fake_job):
    action = Clip(lift=True)
    args = action.plan(context())

    seen = action.perform(fake_job({"clip_bound": None}), args, key="k")
    assert action.effect(check(args, seen, {"clip_bound": None}, 9)) is None
    assert "not left alone" in action.effect(check(args, seen, {"clip_bound": 0.5}, 9))


def test_the_scale_may_have_been_halved_once(context, fake_job):
    """The step before the reset may have overflowed, and the scaler looks at it afterwards."""
    action = LossScale(set=1024.0)
    args = action.plan(context())
    seen = action.perform(fake_job({"loss_scale": 1024.0, "backoff": 0.5}), args, key="k")

    shows = [
        action.effect(check(args, seen, {"loss_scale": x}, 9)) for x in (1024.0, 512.0, 65536.0)
    ]
    assert shows == [None, None, "the loss scale is 65536, not 1024"]
    assert LossScale().plan(context()) == {"scale": None}


def test_weights_that_cannot_be_checked_are_no_failure(context, fake_job):
    action = CheckWeights()
    args = action.plan(context())
    seen = action.perform(fake_job(ActionError("rank 0 refused")), args, key="k")

    assert seen == {"why": "rank 0 refused"} and action.objection(args, Payload(seen)) == ""


def test_a_savepoint_of_damaged_weights_does_not_prove_them_good(context):
    """It may have been taken between the damage and the first breach, at step 150."""
    action = CheckWeights(within=1.1)
    args, was = action.plan(context()), [[100, 2.0], [149, 3.0], [151, 3.0]]

    assert action.objection(args, Payload({"loss": 3.0, "was": was})) == ""
    assert "had 2 before step 150" in action.objection(args, Payload({"loss": 2.2, "was": was}))


@pytest.mark.parametrize(
    ("book", "loss", "good"),
    [
        ("undo-update", 2.16, False),  # damage of ten steps ago, mended in part
        ("undo-update", 2.13, True),
        ("rollback-and-rewarm", 2.18, True),  # behind bad batches
    ],
)
def test_weights_that_mend_are_damaged_where_no_batch_is_the_cause(context, book, loss, good):
    steps = shipped_policy("nano").runbooks[book].steps
    (check,) = (step for step in steps if isinstance(step, CheckWeights))
    seen = Payload({"loss": loss, "was": [[149, 2.0]]})

    assert bool(check.objection(check.plan(context()), seen)) is good


@pytest.mark.parametrize(("requeue", "code"), [(False, 78), (True, 75)])
def test_stop_tells_the_scheduler_whether_to_run_it_again(requeue, code, context, fake_job):
    """78: a person is needed; 75: running it again is safe. A job that waits is stopped."""
    job = fake_job({"how": "term", "returncode": -15, "survivors": []})
    action = Stop(grace=5.0, term=6.0, requeue=requeue, if_idle=10.0)

    action.perform(job, action.plan(context()), key="k")

    assert job.calls == [("work", 10.0), ("stop", 5.0, 6.0, code)]


def test_the_longest_stop_fits_into_its_deadline():
    """What `check` allows, the performer waits for."""
    longest = Stop(grace=300.0, term=300.0)

    assert longest.check() == []
    assert longest.grace + longest.term + 30 <= longest.deadline_s


def test_a_checkpoint_is_ordered_where_the_job_keeps_its_own(context, fake_job):
    """On any number of ranks: the state is not changed."""
    job = fake_job({"path": "/o/ckpt.supervise-154.pt", "step": 154, "how": "on-demand"})
    action = Checkpoint()
    args = action.plan(context(world_size=8))

    assert action.perform(job, args, key="k")["step"] == 154
    assert job.calls == [("checkpoint", {"path": None}, "k")]
    assert not action.destructive and action.touches_job and action.budget is None


@pytest.mark.parametrize("works", [{"cpu_s": 5.0, "bytes": 0}, {"cpu_s": 0.0, "bytes": 10**8}])
def test_a_job_that_works_is_not_stopped(works, context, fake_job):
    """No steps, but CPU or data moves: an upload after the last step. Refused before any harm."""
    stop = Stop(if_idle=10.0)
    job = fake_job(works=works)

    with pytest.raises(ActionError, match="makes no steps but works"):
        stop.perform(job, stop.plan(context()), key="k")
    assert job.calls == [("work", 10.0)]


@pytest.mark.parametrize(
    ("action", "wrong"),
    [
        *((Pause(lease=lease), "lease") for lease in (0.0, 9.0, 1e6, float("nan"))),
        # It only ever lowers a rate, and never freezes a run at 0.
        *((LrScale(set=scale), "set") for scale in (0.0, 1.5, float("nan"), float("inf"))),
        (LrScale(set=0.5, rewarm=-1), "rewarm"),
        # A clip is a norm, a share of the usual one, or the end of it.
        (Clip(), "max_norm"),
        (Clip(max_norm=1.0, factor=0.3), "max_norm"),
        (Clip(max_norm=1.0, lift=True), "max_norm"),
        (Clip(max_norm=0.0, for_=-1), "max_norm for"),
        (Clip(factor=1.5), "factor"),
        (Clip(max_norm=0.5), ""),
        (Clip(factor=0.3, for_=0), ""),
        (UpdateClip(sigma=-1.0, window=1, for_=-1, max_gb=0.0), "sigma window for max_gb"),
        (LossScale(set=0.0), "set"),
        (LossScale(set=1e9), "set"),
        (RaiseSampling(every=0, for_=0), "every for"),
        (Profile(steps=0), "steps"),
        (Profile(steps=21), "steps"),
        (Stop(grace=301.0, term=-1.0), "grace term"),
        (SkipStep(count=0), "count"),
        (SkipStep(count=4), "count"),
        (SkipStep(count=300, most=300), ""),
        (SkipStep(count=1001, most=1001), "most"),
        (Verify(within=10, clear_for=20), "within"),
        (Verify(clear_for=0), "clear_for"),
        (Rollback(at_least=-1, start=0.0, rewarm=-5), "at_least start rewarm"),
        (Relaunch(at_least=-1, start=1.5, rewarm=-5, skip=-1), "at_least rewarm skip start"),
        (Quarantine(shards="none"), "shards"),
        (Quarantine(shards=()), "shards"),
        (Quarantine(max_fraction=0.0), "max_fraction"),
        (Unquarantine(shards=("",)), "shards"),
    ],
    ids=str,
)
def test_values_that_cannot_work_are_named_by_their_key(action, wrong):
    assert [field for field, _ in action.check()] == wrong.split()


@pytest.mark.parametrize(
    ("action", "undo"),
    [
        (Pause(), Resume()),
        (Resume(), None),
        (LrScale(set=0.5, rewarm=9), LrScale(set=1.0)),
        (LrScale(set=1.0), None),
        *((kind(), kind(lift=True)) for kind in (UpdateClip, RaiseSampling)),
        (Clip(factor=0.3), Clip(lift=True)),
        *((kind(lift=True), None) for kind in (Clip, UpdateClip, RaiseSampling)),
        *((kind(), None) for kind in (LossScale, Profile, Rollback, Relaunch)),
    ],
    ids=str,
)
def test_undo_is_the_action_that_takes_it_back(action, undo):
    assert action.undo() == undo
    assert undo is None or undo.check() == []


def test_suspects_become_names(context, fake_job):
    """Absolute, with the most that may be in quarantine at once, and what to answer for."""
    args = Quarantine().plan(context(suspects=("a.tar", "b.tar"), shards=149))

    assert args["add"] == [{"kind": "shard", "name": "a.tar"}, {"kind": "shard", "name": "b.tar"}]
    assert (args["most"], args["incident"], args["step"], args["attempt"]) == (2, "inc-1", 150, 0)
    made = fake_job(HELD)
    assert Quarantine().perform(made, args, key="k")["generation"] == 3
    assert made.calls == [(args, "k")]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"shards": 40}, "none of the 40 shards seen is a suspect"),
        ({}, "does not report which shards"),
        (
            {"suspects": ("a.tar",), "shards": 40},
            "max_fraction 0.02 of the 40 shards seen so far is less than one shard, so it allows "
            "none; 0.025 is the smallest that allows one",
        ),
    ],
)
def test_an_empty_selection_and_a_large_one_are_refused(changes, why, context):
    with pytest.raises(Refused, match=why):
        Quarantine().plan(context(**changes))


def test_named_shards_are_taken_as_they_are(context):
    """In a job that tells of none a name means nothing; it is said what can be done."""
    named = Quarantine(shards=("x.tar",))

    with pytest.raises(Refused, match=r"does not report which shards.* quarantine\.json written"):
        named.plan(context())
    assert named.plan(context(shards=100))["add"] == [{"kind": "shard", "name": "x.tar"}]
    with pytest.raises(Refused, match=r"allows none; 0\.1 is the smallest that allows one"):
        named.plan(context(shards=10))
    with pytest.raises(Refused, match="of so few none is ever allowed"):
        named.plan(context(shards=1))


@pytest.mark.parametrize("seen", range(2, 50))
def test_the_fraction_that_is_named_allows_one(context, seen):
    """Also where 1 / 49 of 49 comes out below 1."""
    with pytest.raises(Refused) as refused:
        Quarantine(shards=("x.tar",)).plan(context(shards=seen))
    told = float(str(refused.value).split("none; ")[1].split()[0])
    asked = Quarantine(shards=("x.tar",), max_fraction=told)

    assert asked.check() == [] and asked.plan(context(shards=seen))["most"] == 1


def test_a_person_is_on_record_and_not_bound_by_what_was_seen_so_far(context):
    """Who knows of 41 bad shards need not wait until the job has met 82."""
    many = Quarantine(shards=tuple(f"{n}.tar" for n in range(41)), max_fraction=0.5)
    asked = many.plan(context(shards=16, operator="anna"))

    assert (len(asked["add"]), asked["most"], asked["by"]) == (41, None, "anna")
    assert Unquarantine(shards=("a.tar",)).plan(context(operator="anna"))["by"] == "anna"
    assert Quarantine().plan(context(suspects=("a.tar",), shards=149))["by"] == "policy"
    with pytest.raises(Refused, match=r"41 shards are more than .* 0\.5 of the 16 .* allows 8"):
        many.plan(context(shards=16))


def test_positions_are_the_batches_up_to_the_breach(context):
    action = Quarantine(shards="none", positions="breach")

    assert action.plan(context(batches=(17, 18)))["add"] == [
        {"kind": "batch", "name": "17"},
        {"kind": "batch", "name": "18"},
    ]
    with pytest.raises(Refused, match="has a fingerprint"):
        action.plan(context())
    with pytest.raises(Refused, match="2 ranks"):
        action.plan(context(batches=(17,), world_size=2))


def test_undo_releases_what_the_incident_brought_in(context, fake_job):
    undo = Quarantine().undo()
    made = fake_job(HELD)
    undo.perform(made, undo.plan(context()), key="k")

    assert made.calls[0][0]["release"] == {"incident": "inc-1"}
    assert Unquarantine(shards=("a.tar",)).plan(context())["release"] == ["a.tar"]


# ── what holds for every action ───────────────────────────────────────────────────────────────────


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
def test_it_returns_what_was_observed_and_fails_where_nothing_was(verb, context, fake_job):
    """One call to the job, with the aimed arguments; a refusal of the probe is passed on."""
    action = CATALOG[verb](**NEEDED.get(verb, {}))
    job, refusal = fake_job(ANSWERS[verb]), ActionError("rank 0 refused", retryable=False)
    args = action.plan(context())

    assert action.perform(job, args, key="k") == ANSWERS[verb]
    assert [call[0] for call in job.calls] == [verb]
    with pytest.raises(ActionError):
        action.perform(fake_job({}), args, key="k")
    with pytest.raises(ActionError) as caught:
        action.perform(fake_job(refusal), args, key="k")
    assert caught.value is refusal


def test_zero_actions_means_nothing_that_touches_the_job():
    free = {verb for verb, action in CATALOG.items() if not action.touches_job}

    assert free == {
        *("snapshot", "hold", "notify", "verify", "raise_sampling", "profile", "check_weights")
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
