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
    "checkpoint": {"path": "/o/ckpt.supervise-154.pt", "step": 154, "how": "on-demand"},
}
HELD = {"generation": 3, "held": 3, "entries": 4, "ranks": 1}


@pytest.mark.parametrize(
    ("action", "call"),
    [
        (Pause(lease=60.0), ("pause", {"lease_s": 60.0}, "k")),
        # Absolute: asked twice for 0.5 it is 0.5.
        (LrScale(set=0.5, rewarm=9), ("lr_scale", {"value": 0.5, "rewarm_steps": 9}, "k")),
        # The supervisor does not know the job's own clip.
        (Clip(factor=0.3), ("clip", {"max_norm": None, "factor": 0.3, "steps": 500}, "k")),
        (LossScale(), ("loss_scale", {"scale": None}, "k")),
        (Checkpoint(), ("checkpoint", {"path": None}, "k")),
        # The exit code: 78, a person is needed; 75, running it again is safe.
        (Stop(grace=5.0, term=6.0), ("stop", 5.0, 6.0, 78)),
        (Stop(grace=5.0, term=6.0, requeue=True), ("stop", 5.0, 6.0, 75)),
    ],
    ids=str,
)
def test_an_order_reaches_the_job_with_its_arguments(action, call, context, fake_job):
    job = fake_job(ANSWERS[call[0]] | {"clip_bound": 0.15})

    action.perform(job, action.plan(context()), key="k")

    assert job.calls == [call]


RULE = {"window": 128, "sigma": 3.0}


@pytest.mark.parametrize(
    ("action", "answer", "error"),
    [
        (LrScale(set=0.5), {"lr_scale": 0.25}, "asked for a learning rate scale of 0.5, the job"),
        (LrScale(set=0.5), {"lr_scale": "0.5"}, "asked for a learning rate scale of 0.5, the job"),
        *((Clip(max_norm=0.5), {"clip_bound": x}, "clip") for x in (0.6, None, float("inf"))),
        (Clip(lift=True), {"clip_bound": 0.5}, "to be lifted, and the job has"),
        (UpdateClip(sigma=3.0), {"update_clip": None}, "an update clip of"),
        (UpdateClip(sigma=2.0), {"update_clip": RULE}, "asked for an update clip"),
        (UpdateClip(lift=True), {"update_clip": RULE}, "update clip"),
        (LossScale(set=1024.0), {"loss_scale": 64.0}, "asked for a loss scale of 1024"),
        (Stop(), {"how": "kill", "returncode": -9, "survivors": [77]}, "still alive after KILL"),
        (SkipStep(count=2), {"will_skip": 1}, "asked to skip 2 steps"),
        (Checkpoint(), {"path": "x"}, "scheduled no checkpoint"),
        (Rollback(), {"step": 140, "attempt": 1}, "at step 140 after a rollback to before step"),
        (Rollback(), {"step": None, "attempt": 1}, "at step None after a rollback to before step"),
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
    action, answer, error, context, fake_job
):
    with pytest.raises(ActionError, match=error):
        action.perform(fake_job(answer), action.plan(context(batches=(17,))), key="k")


RESET = {"loss_scale": 1024.0, "backoff": 0.5}
SCHEDULED = {"learning_rate": 3.0, "learning_rate_scheduled": 3.0, "lr_scale": 1.0}
LIMITED = {"learning_rate": 0.1, "lr_hold": 1 / 30, "lr_scale": 1 / 30}


@pytest.mark.parametrize(
    ("action", "answer", "frame", "missing"),
    [
        (HoldRate(), {"rate_limit": 0.1, "groups": 1}, SCHEDULED | LIMITED, None),
        (HoldRate(), {"rate_limit": 0.1, "groups": 1}, SCHEDULED | {"lr_hold": 1.0}, None),  # over
        (HoldRate(), {"rate_limit": 0.1, "groups": 1}, SCHEDULED, "not at most 0.1"),
        (HoldRate(), {"rate_limit": 0.1, "groups": 1}, {}, None),
        # A factor is resolved by the job: the answer is the absolute bound.
        (Clip(factor=0.3), {"clip_bound": 0.15}, {"clip_bound": 0.15}, None),
        (Clip(factor=0.3), {"clip_bound": 0.15}, {}, None),
        (Clip(factor=0.3), {"clip_bound": 0.15}, {"clip_bound": 0.5}, "clipped to 0.5, not 0.15"),
        (Clip(lift=True), {"clip_bound": None}, {"clip_bound": None}, None),
        (Clip(lift=True), {"clip_bound": None}, {"clip_bound": 0.5}, "not left alone"),
        (LossScale(set=1024.0), RESET, {"loss_scale": 1024.0}, None),
        # The step before the reset may have overflowed, which halves the scale once.
        (LossScale(set=1024.0), RESET, {"loss_scale": 512.0}, None),
        (LossScale(set=1024.0), RESET, {"loss_scale": 65536.0}, "65536, not 1024"),
    ],
)
def test_an_effect_that_a_frame_lacks_is_named(action, answer, frame, missing, context):
    args = Payload(action.plan(context()))

    objection = action.explain_missing_effect(EffectCheck(args, Payload(answer), frame, 154, 0))

    assert objection is None if missing is None else missing in objection


def test_a_clip_that_the_job_has_lifted_is_lifted(context, fake_job):
    action, answer = Clip(lift=True), {"clip_bound": None}
    assert action.perform(fake_job(answer), action.plan(context()), key="k") == answer


def test_weights_that_cannot_be_checked_are_no_failure(context, fake_job):
    action = CheckWeights()
    args = action.plan(context())
    result = action.perform(fake_job(ActionError("rank 0 refused")), args, key="k")

    assert result == {"why": "rank 0 refused"} and action.objection(args, Payload(result)) == ""


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
    result = Payload({"loss": loss, "was": [[149, 2.0]]})

    assert bool(check.objection(check.plan(context()), result)) is good


def test_the_longest_stop_fits_into_its_deadline():
    longest = Stop(grace=300.0, term=300.0)

    assert longest.find_errors() == []
    assert longest.grace + longest.term + 30 <= longest.deadline_s


def test_a_job_without_steps_is_stopped_only_where_neither_cpu_nor_data_moves(context, fake_job):
    """It may upload after its last step. Refused before any harm."""
    stop = Stop(if_idle=10.0)
    for works in ({"cpu_s": 5.0, "bytes": 0}, {"cpu_s": 0.0, "bytes": 10**8}):
        job = fake_job(works=works)
        with pytest.raises(ActionError, match="makes no steps but works"):
            stop.perform(job, stop.plan(context()), key="k")
        assert job.calls == [("work", 10.0)]

    idle = fake_job(ANSWERS["stop"])
    stop.perform(idle, stop.plan(context()), key="k")
    assert [call[0] for call in idle.calls] == ["work", "stop"]


@pytest.mark.parametrize(
    ("action", "wrong"),
    [
        *((Pause(lease=lease), "lease") for lease in (9.0, 1e6, float("nan"))),
        *((Pause(lease=lease), "") for lease in (10.0, 86400.0)),
        # It only ever lowers a rate, and never freezes a run at 0.
        *((LrScale(set=scale), "set") for scale in (0.0, 1.5, float("nan"))),
        (LrScale(set=0.5, rewarm=-1), "rewarm"),
        # A clip is a norm, a share of the usual one, or the end of it.
        (Clip(), "max_norm"),
        (Clip(max_norm=1.0, factor=0.3), "max_norm"),
        (Clip(max_norm=1.0, lift=True), "max_norm"),
        (Clip(max_norm=0.0, for_=-1), "max_norm for"),
        (Clip(factor=1.5), "factor"),
        (Clip(factor=0.3, for_=0), ""),
        (UpdateClip(sigma=-1.0, window=1, for_=-1, max_gb=0.0), "sigma window for max_gb"),
        *((LossScale(set=scale), "set") for scale in (0.0, 1e9)),
        (LossScale(set=1024.0), ""),
        (CheckWeights(within=1.0, again=0), "within again"),
        *((CheckWeights(within=within, again=1), "") for within in (1.01, 10.0)),
        (RaiseSampling(every=0, for_=0), "every for"),
        *((Profile(steps=steps), "steps") for steps in (0, 21)),
        (Stop(grace=301.0, term=-1.0), "grace term"),
        *((SkipStep(count=count), "count") for count in (0, 4)),
        (SkipStep(count=300, most=300), ""),
        (SkipStep(count=1001, most=1001), "most"),
        (Verify(within=10, clear_for=20), "within"),
        (Verify(clear_for=0), "clear_for"),
        (Rollback(at_least=-1, start=0.0, rewarm=-5), "at_least start rewarm"),
        (Relaunch(at_least=-1, start=1.5, rewarm=-5, skip=-1), "at_least rewarm skip start"),
        *((Quarantine(shards=shards), "shards") for shards in ("none", (), ("",))),
        (Quarantine(max_fraction=0.0), "max_fraction"),
        (Unquarantine(shards=("",)), "shards"),
    ],
    ids=str,
)
def test_values_that_cannot_work_are_named_by_their_key(action, wrong):
    assert [field for field, _ in action.find_errors()] == wrong.split()


@pytest.mark.parametrize(
    ("action", "undo"),
    [
        (Pause(), Resume()),
        (LrScale(set=0.5, rewarm=9), LrScale(set=1.0)),
        (LrScale(set=1.0), None),
        *((kind(), kind(lift=True)) for kind in (UpdateClip, RaiseSampling, Clip)),
        *((kind(lift=True), None) for kind in (Clip, UpdateClip, RaiseSampling)),
        *((kind(), None) for kind in (Resume, LossScale, Profile, Rollback, Relaunch)),
    ],
    ids=str,
)
def test_undo_is_the_action_that_takes_it_back(action, undo):
    assert action.undo() == undo


def test_suspect_shards_are_put_into_quarantine_by_name(context, fake_job):
    """Absolute, with the most that may be in quarantine at once, and what to answer for."""
    args = Quarantine().plan(context(suspects=("a.tar", "b.tar"), shards=149))

    assert args["add"] == [{"kind": "shard", "name": name} for name in ("a.tar", "b.tar")]
    assert (args["most"], args["incident"], args["step"], args["attempt"]) == (2, "inc-1", 150, 0)
    job = fake_job(HELD)
    assert Quarantine().perform(job, args, key="k")["generation"] == 3
    assert job.calls == [(args, "k")]


NAMED = Quarantine(shards=("x.tar",))
BATCHES = Quarantine(shards="none", positions="breach")


@pytest.mark.parametrize(
    ("action", "changes", "why"),
    [
        (Quarantine(), {"shards": 40}, "none of the 40 shards seen is a suspect"),
        (
            Quarantine(),
            {"suspects": ("a.tar",), "shards": 40},
            "max_fraction 0.02 of the 40 shards seen so far is less than one shard, so it allows "
            "none; 0.025 is the smallest that allows one",
        ),
        # In a job that reports none a name means nothing.
        (NAMED, {}, r"does not report which shards.* quarantine\.json written"),
        (NAMED, {"shards": 1}, "of so few none is ever allowed"),
        (BATCHES, {}, "has a fingerprint"),
        (BATCHES, {"batches": (17,), "world_size": 2}, "2 ranks"),
    ],
)
def test_a_quarantine_of_nothing_or_of_too_much_is_refused(action, changes, why, context):
    with pytest.raises(Refused, match=why):
        action.plan(context(**changes))


@pytest.mark.parametrize("count", [2, 10, 49])
def test_the_fraction_that_a_refusal_names_allows_one_shard(context, count):
    """Also where 1 / 49 of 49 comes out below 1."""
    with pytest.raises(Refused) as refused:
        NAMED.plan(context(shards=count))
    fraction = float(str(refused.value).split("none; ")[1].split()[0])
    action = dataclasses.replace(NAMED, max_fraction=fraction)

    assert action.find_errors() == [] and action.plan(context(shards=count))["most"] == 1


def test_an_operator_is_on_record_and_not_bound_by_what_was_seen_so_far(context):
    """Who knows of 41 bad shards need not wait until the job has met 82."""
    many = Quarantine(shards=tuple(f"{n}.tar" for n in range(41)), max_fraction=0.5)
    order = many.plan(context(shards=16, operator="anna"))

    assert (len(order["add"]), order["most"], order["by"]) == (41, None, "anna")
    assert Unquarantine(shards=("a.tar",)).plan(context(operator="anna"))["by"] == "anna"
    assert NAMED.plan(context(shards=149))["by"] == "policy"
    with pytest.raises(Refused, match=r"41 shards are more than .* 0\.5 of the 16 .* allows 8"):
        many.plan(context(shards=16))


def test_positions_are_the_batches_up_to_the_breach(context):
    added = BATCHES.plan(context(batches=(17, 18)))["add"]

    assert added == [{"kind": "batch", "name": name} for name in ("17", "18")]


def test_undo_of_a_quarantine_releases_what_the_incident_brought_in(context, fake_job):
    undo = Quarantine().undo()
    job = fake_job(HELD)
    undo.perform(job, undo.plan(context()), key="k")

    assert job.calls[0][0]["release"] == {"incident": "inc-1"}
    assert Unquarantine(shards=("a.tar",)).plan(context())["release"] == ["a.tar"]


# ── what holds for every action ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("verb", CATALOG)
def test_every_action_is_documented_and_can_work_by_its_defaults(verb):
    """Every int counts steps and is marked so, for the loader."""
    kind = CATALOG[verb]
    page = inspect.getdoc(kind)
    hints = typing.get_type_hints(kind, include_extras=True)

    assert all(heading in page for heading in ("Example:\n", "Undo: ", "Source: "))
    assert f"- {verb}" in page
    assert int not in {hints[field.name] for field in dataclasses.fields(kind)}
    assert kind(**NEEDED.get(verb, {})).find_errors() == []


@pytest.mark.parametrize(
    "verb", [*(verb for verb in FENCED if verb in CATALOG), "relaunch", "stop", "profile"]
)
def test_with_several_ranks_what_changes_training_is_fenced(verb, context):
    """It is planned as with one rank; `fencing` carries it out at one step."""
    CATALOG[verb](**NEEDED.get(verb, {})).plan(context(world_size=4))

    assert CATALOG[verb].changes_training is (verb in FENCED)


@pytest.mark.parametrize("verb", ANSWERS)
def test_an_action_returns_what_was_observed_and_fails_where_nothing_was(verb, context, fake_job):
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


def test_only_some_actions_leave_the_job_alone_and_only_some_destroy():
    untouched = {verb for verb, action in CATALOG.items() if not action.touches_job}
    destructive = {verb for verb, action in CATALOG.items() if action.destructive}

    assert untouched == {
        *("snapshot", "hold", "notify", "verify", "raise_sampling", "profile", "check_weights")
    }
    assert destructive == {"quarantine", "relaunch", "rollback", "skip_step", "stop"}
