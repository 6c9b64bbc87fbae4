"""The supervisor's verbs, on jobs that know nothing of them."""

import json
import time
from pathlib import Path

import pytest

LOOP = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{setup}
step = 0
while step < {steps}:
    if step == 5:
        barrier("go")
    x = torch.randn(8, 4)
    {before}
    optimizer.zero_grad()
    loss = ((model(x) - 1) ** 2).mean()
    loss.backward()
    optimizer.step()
    {after}
    step += 1
finish(model)
"""


def loop(steps=30, setup="pass", before="pass", after="pass"):
    return LOOP.format(steps=steps, setup=setup, before=before, after=after)


PARTS = "[L.LinearLR(optimizer, 0.1, 1, 9), L.ExponentialLR(optimizer, 0.9)]"
WARMED = f"SequentialLR(optimizer, {PARTS}, [9])"


@pytest.mark.parametrize(
    ("schedule", "known"),
    [
        ("LambdaLR(optimizer, lambda k: 0.99**k)", True),
        (WARMED, True),
        ("LambdaLR(optimizer, lambda k: 0.1 if k < 15 else 1.0)", True),  # by epochs
        ("StepLR(optimizer, 99)", False),
    ],
)
def test_a_rate_that_the_job_overwrites_is_not_what_its_scheduler_gives(probed, schedule, known):
    """It is compared with the scheduler's word once that has proved to decide."""
    before = f"""if step == 0:
        L = torch.optim.lr_scheduler
        s = L.{schedule}
    if step in (20, 21, 22):
        optimizer.param_groups[0].update(lr=0.5, initial_lr=0.5)"""
    job = probed.straight(loop(before=before, after="s.step()"))
    initial = job.column("learning_rate_initial")
    assert [rate == 0.5 for rate in initial] == [False] * 20 + [True] * 10
    used, expected = job.column("learning_rate"), job.column("learning_rate_expected")
    assert used[20:23] == [0.5] * 3 and [rate is not None for rate in expected[15:]] == [known] * 15
    for step, rate in enumerate(expected):
        assert rate is None or (rate == used[step]) == (used[step] != 0.5)


@pytest.mark.parametrize("rate", ["1.0", "1"])
def test_another_optimizer_says_with_which_rate_it_begins(probed, rate):
    """As LBFGS behind Adam: its rate is of another kind, and no jump of the first."""
    script = f"""
model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(12):
    if step == 6:
        optimizer = torch.optim.LBFGS(model.parameters(), lr={rate}, max_iter=2)
    x = torch.randn(8, 4)

    def closure():
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
"""
    job = probed.run(script)
    assert job.column("learning_rate") == [1e-3] * 6 + [1.0] * 6
    assert job.column("learning_rate_initial") == [None] * 6 + [1.0] + [None] * 5


@pytest.mark.parametrize(
    ("rate", "schedule"),
    [
        ("0.1", "CosineAnnealingLR(optimizer, 60)"),
        ("torch.tensor(0.1)", "ExponentialLR(optimizer, 0.97)"),
    ],
    ids=["recursive", "tensor"],
)
def test_the_scale_composes_with_any_schedule(probed, bare, rate, schedule):
    script = loop(
        setup=f"optimizer.param_groups[0]['lr'] = {rate}; s = torch.optim.lr_scheduler.{schedule}",
        after="emit(lr=float(optimizer.param_groups[0]['lr'])); s.step()",
    )
    job, ack = probed.ordered(script, ("lr_scale", {"value": 0.5, "rewarm_steps": 10}))
    first = ack.step + 1
    assert ack.ok and ack.result["lr_scale"] == 0.5
    factors = [1.0] * first + [0.5 + 0.05 * k for k in range(10)] + [1.0] * 30
    own = [row["lr"] for row in bare.straight(script).output[:-1]]
    assert [row["lr"] for row in job.output[:-1]] == own
    assert job.column("learning_rate_scheduled") == pytest.approx(own)
    assert job.column("lr_scale") == pytest.approx(factors[:30])
    assert job.column("learning_rate") == pytest.approx(
        [f * lr for f, lr in zip(factors[:30], own, strict=True)]
    )


@pytest.mark.parametrize(
    ("value", "rewarm_steps", "first_step", "held"),
    [
        (0.25, 0, 3, [0.25] * 3),  # also where it goes back to before the order
        (0.5, 100, 26, [0.6, 0.605, 0.61]),  # as it would have been at that step
        (0.5, 10, 3, [1.0] * 3),  # it had ended
    ],
)
def test_a_scale_outlives_the_process(probed, value, rewarm_steps, first_step, held):
    order = ("lr_scale", {"value": value, "rewarm_steps": rewarm_steps})
    job, ack = probed.ordered(loop(), order)
    assert ack.step == 5
    config = {"attempt": 1, "first_step": first_step, "marks": str(job.folder / "probe")}
    again = probed.straight(loop(steps=9), **config)
    assert again.column("lr_scale")[:3] == pytest.approx(held)
    told = [n.message for n in again.notices if "learning rate" in n.message]
    assert bool(told) == (held[0] != 1.0)
    afresh = probed.straight(loop(steps=9), marks=config["marks"])
    assert set(afresh.column("lr_scale")) == {1.0}


JUMP = {
    "setup": """optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.2})
s = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
TENSOR""",
    "before": """factor = 30 if 5 <= step < 10 else 1
    own = [float(g["lr"]) for g in optimizer.param_groups]
    emit(lr=own)
    if factor != 1 and step < 30:
        for g in optimizer.param_groups:
            g["lr"] = g["lr"] * factor""",
    "after": """if factor != 1:
        for g in optimizer.param_groups:
            g["lr"] = g["lr"] / factor
    s.step()""",
}
TENSOR = 'optimizer.param_groups[0]["lr"] = torch.tensor(0.1)'


@pytest.mark.parametrize("kind", ["pass", TENSOR])
def test_a_rate_that_jumps_is_held_until_the_job_asks_for_no_more(probed, kind):
    """In the very next update, in every group, under a scheduler."""
    script = loop(**{**JUMP, "setup": JUMP["setup"].replace("TENSOR", kind)})
    script = script.replace("if step == 5:", "if step == 6:")
    hold = {"within": 1.0, "release": 8}
    orders = [("hold_rate", {"before_step": step, **hold}) for step in (5, 0)]
    job, ack, refused = probed.ordered(script, *orders)
    assert (ack.ok, ack.step, ack.result["groups"]) == (True, 5, 2)
    assert "no parameter group has a rate from before step 0" in refused.error
    own = [row["lr"] for row in job.output[:-1]]
    level = ack.result["rate_limit"]
    assert level == pytest.approx(own[4][0])
    for group, name in enumerate(("learning_rate", "learning_rate.1")):
        rates = [each[group] for each in own]
        expected = [*rates[:5], 30 * rates[5], *[rates[4]] * 4, *rates[10:]]
        assert job.column(name) == pytest.approx(expected)
    held = [level / (30 * each[0]) for each in own[6:10]] + [1.0] * 8
    assert job.column("lr_hold")[6:18] == pytest.approx(held)
    assert job.column("lr_hold")[5] is job.column("lr_hold")[18] is None
    assert any("held no more" in n.message for n in job.notices)


def test_a_hold_outlives_the_process_until_it_is_let_go(probed):
    order = ("hold_rate", {"before_step": 4, "within": 0.5, "release": 0})
    job, _ = probed.ordered(loop(steps=9), order)
    config = {"attempt": 1, "first_step": 3, "marks": str(job.folder / "probe")}
    again, ack = probed.ordered(loop(steps=9), ("lr_scale", {"value": 1.0}), **config)
    assert ack.ok and any("still held" in n.message for n in again.notices)
    assert again.column("learning_rate") == pytest.approx([0.05] * 6 + [0.1] * 3)


def test_a_rate_that_did_harm_is_limited_until_the_schedule_passes_under_it(probed):
    """Groups keep their proportions."""
    setup = """w, b = model.parameters()
    optimizer = torch.optim.SGD([{"params": [w]}, {"params": [b], "lr": 0.2}], lr=0.1)
    s = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)""".replace("\n    ", "\n")
    order = ("hold_rate", {"before_step": 2, "limit": 0.03, "release": 4})
    job, ack = probed.ordered(loop(setup=setup, after="s.step()"), order)
    assert ack.result == {"rate_limit": 0.03, "groups": 2}
    first_held = ack.step + 1
    for group, first in (("learning_rate", 0.1), ("learning_rate.1", 0.2)):
        own = [first * 0.9**step for step in range(30)]
        limited = [min(rate, 0.3 * first) for rate in own]
        assert job.column(group) == pytest.approx([*own[:first_held], *limited[first_held:]])
    assert any("held no more" in n.message for n in job.notices)


def test_a_pause_holds_the_job_until_resume(probed, bare):
    job = probed.start(loop())
    ack = job.order("pause", lease_s=60)
    assert ack.result == {"paused_step": ack.step}
    assert job.segment().beat().phase == "paused" and job.segment().status()["paused"]
    scaled = job.answer(job.send("lr_scale", value=1.0))
    assert scaled.ok and scaled.step == ack.step
    before = len(job.frames)
    time.sleep(0.2)
    job.poll()
    assert len(job.frames) == before == ack.step + 1
    resumed = job.answer(job.send("resume"))
    assert resumed.result["resumed"] and resumed.result["held_s"] > 0.2
    probed.wait(job)
    assert job.column("step_time")[ack.step + 1] < 0.2
    assert job.output[-1] == bare.straight(loop()).output[-1]


@pytest.mark.parametrize("asked_s", [0.2, 1e6])
def test_a_dead_supervisor_strands_no_job(probed, asked_s):
    job = probed.start(loop(), lease_s=0.4)
    began = time.monotonic()
    ack = job.order("pause", lease_s=asked_s)
    job.segment().lease(time.monotonic_ns() + (800_000_000 if asked_s < 1 else 1 << 62))
    probed.wait(job)
    (ended,) = (notice for notice in job.notices if notice.kind == "pause-ended")
    assert ack.ok and time.monotonic() - began > 0.3 and len(job.frames) == 30
    assert ended.data["key"] == ack.key and ended.data["paused_step"] == ack.step


def test_stop_interrupts_at_the_boundary(probed):
    """KeyboardInterrupt in the job's own loop, where it can still save its state."""
    script = (
        "try:\n    "
        + loop().replace("\n", "\n    ")
        + "\nexcept KeyboardInterrupt:\n    emit(saved=step)\n    raise SystemExit(3)"
    )
    job, ack = probed.ordered(script, ("stop", {"how": "interrupt"}), code=3)
    assert job.output == [{"saved": ack.result["stopping_step"]}]
    assert len(job.frames) == ack.step + 1


def test_a_skipped_step_leaves_the_weights_alone(probed):
    weight = "old = model.weight.detach().clone()"
    script = loop(before=weight, after="emit(same=bool((old == model.weight).all()))")
    job, ack = probed.ordered(script, ("skip_step", {"count": 2}))
    assert ack.result == {"will_skip": 2}
    skipped = [i for i, row in enumerate(job.output[:-1]) if row["same"]]
    assert skipped == [ack.step + 1, ack.step + 2]
    assert [i for i, n in enumerate(job.column("update_skipped")) if n] == skipped
    assert [job.column("update_norm")[i] for i in skipped] == [0.0, 0.0]
    assert job.frames[-1]["steps_seen"] == 28 and job.frames[-1]["skipped_updates"] == 2


def test_a_snapshot_writes_stacks_generators_and_batches(probed, tmp_path):
    """Evidence that only the inside of the job has; taking it changes no random draw."""
    _, ack = probed.ordered(loop(), ("snapshot", {"directory": str(tmp_path / "evidence")}))
    stacks, rng, batches = (Path(path).read_text() for path in ack.result["files"])
    assert "train.py" in stacks
    assert {"python", "torch"} <= set(json.loads(rng))
    assert [row["step"] for row in json.loads(batches)] == list(range(ack.step + 1))


@pytest.mark.parametrize(
    ("verb", "args", "says"),
    [
        ("dance", {}, "no verb 'dance'"),
        ("rollback", {"before_step": 5}, "no savepoints are kept"),
        ("snapshot", {"directory": "/proc/nowhere"}, "nowhere"),
        ("pause", {"lease_s": 60, "until_ns": 1}, "after its deadline"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(probed, verb, args, says):
    job, ack = probed.ordered(loop(), (verb, args))
    assert not ack.ok and says in ack.error
    assert len(job.frames) == 30


def test_one_of_several_ranks_is_not_changed_alone(probed):
    """Verbs that change training need a fence with several ranks; evidence and stop do not."""
    verbs = ("pause", "lr_scale", "rollback", "skip_step", "savepoint")
    verbs += ("clip", "update_clip", "loss_scale")
    orders = [(verb, {"value": 0.5, "before_step": 3}) for verb in verbs]
    job, *acks = probed.ordered(loop(), *orders, environ={"RANK": "1", "WORLD_SIZE": "2"})
    assert job.segment().path.name.startswith("rank-1.") and job.segment().world_size == 2
    assert all("needs a fence" in ack.error for ack in acks)
    assert set(job.column("lr_scale")) == {1.0}


KEEP = {"every": 5, "keep": 3, "max_bytes": 1 << 24}


@pytest.mark.parametrize("late", [False, True])
def test_a_rollback_begins_an_attempt_and_the_counters_of_the_data_go_on(probed, late):
    """Applied steps are those of the weights; tokens seen and the schedule are the loop's."""
    script = loop(
        before="if step == 18: barrier('more')",
        after="F.cross_entropy(torch.ones(2, 3).requires_grad_(), torch.ones(2).long())",
    )
    job = probed.start(script, savepoints=KEEP, late=late)
    job.go()
    ack = job.order("rollback", before_step=12, rewarm={"start": 0.1, "steps": 4}, barrier="more")
    probed.wait(job)
    assert ack.ok, ack.error
    assert ack.result["step"] == 10 and ack.result["attempt"] == 1
    back = ack.result["from_step"] + 1
    assert [f["step"] for f in job.frames] == [*range(30)]
    assert [f["attempt"] for f in job.frames] == [0] * back + [1] * (30 - back)
    ramp = [frame["lr_scale"] for frame in job.frames[back : back + 5]]
    assert ramp == pytest.approx([0.1, 0.325, 0.55, 0.775, 1])
    assert job.frames[-1]["steps_seen"] == 30 - (back - 11)
    assert job.frames[-1]["tokens_seen"] == 2 * 29  # those of the last step come behind it
    assert job.segment().status()["rollback"] == "ready"
