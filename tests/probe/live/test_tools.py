"""The milder tools: what they change in a step, for how long, and that nothing else changes."""

import json
import math
import statistics
from pathlib import Path

import pytest

LOOP = """
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.{optimizer}
{setup}
for step in range({steps}):
    if step == 5:
        barrier("go")
    {before}
    optimizer.zero_grad()
    loss = ((model(torch.randn(8, 4)) - 1) ** 2).mean()
    loss.backward()
    {clip}
    old = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    emit(left=norm(p.grad for p in model.parameters()),
         moved=norm(p - q for p, q in zip(model.parameters(), old)),
         finite=all(bool(p.isfinite().all()) for p in model.parameters()))
    {after}
finish(model)
"""
SCALER = 'scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)'
OWN_CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 0.5)"
DEVICES = pytest.mark.parametrize("late", [False, True], ids=["cpu", "as-on-a-device"])


def loop(
    steps=30,
    optimizer="SGD(model.parameters(), lr=0.1)",
    setup="pass",
    before="pass",
    clip="pass",
    after="pass",
):
    return LOOP.format(
        steps=steps, optimizer=optimizer, setup=setup, before=before, clip=clip, after=after
    )


@DEVICES
def test_a_clip_bounds_the_norm_for_so_many_steps(probed, late):
    order = ("clip", {"max_norm": 0.01, "factor": None, "steps": 6})
    job, ack = probed.ordered(loop(), order, late=late)
    first = ack.step + 1
    left, seen = [row["left"] for row in job.output[:-1]], job.column("grad_global_norm")
    assert ack.result["clip_bound"] == 0.01 and min(seen) > 0.01
    assert left[first : first + 6] == pytest.approx([0.01] * 6)
    assert left[:first] + left[first + 6 :] == pytest.approx(seen[:first] + seen[first + 6 :])
    shown = [step for step, bound in enumerate(job.column("clip_bound")) if bound == 0.01]
    assert shown == list(range(first, first + 6))


@pytest.mark.parametrize("clip", ["pass", OWN_CLIP], ids=["median", "own"])
def test_a_factor_becomes_an_absolute_bound(probed, clip):
    """Of the job's own limit where it clips, else of the median norm of the steps so far."""
    job, ack = probed.ordered(loop(clip=clip), ("clip", {"factor": 0.3, "steps": 0}))
    norms = job.column("grad_global_norm")[: ack.step + 1]
    usual = 0.5 if clip == OWN_CLIP else sorted(norms)[len(norms) // 2]
    assert ack.result["clip_bound"] == pytest.approx(0.3 * usual)
    assert job.output[-2]["left"] <= 0.3 * usual * 1.0001
    assert job.segment().status()["in_force"] == {"clip": ack.result["clip_bound"]}


@DEVICES
def test_the_bound_is_of_unscaled_gradients(probed, late):
    script = loop(12, "SGD(model.parameters(), lr=0.1, fused=True)", SCALER)
    script = script.replace("loss.backward()", "scaler.scale(loss).backward()")
    script = script.replace("optimizer.step()", "scaler.step(optimizer); scaler.update()")
    job, ack = probed.ordered(script, ("clip", {"max_norm": 0.01, "steps": 0}), late=late)
    moved = [row["moved"] for row in job.output[:-1]]
    assert moved[ack.step + 1 :] == pytest.approx([0.1 * 0.01] * (11 - ack.step), rel=1e-3)


@DEVICES
def test_an_update_far_above_its_past_is_cut_to_the_rule(probed, bare, late):
    spike = {"fault": "lr_spike", "step": 24, "params": {"factor": 100, "steps": 2}}
    before = "optimizer.param_groups[0]['lr'] = 1e-2"
    script = loop(40, "AdamW(model.parameters(), lr=1e-2)", before=before)
    order = {"update_clip": {"window": 16, "sigma": 2.0, "max_gb": 1.0}}
    job = probed.straight(script, drills=[spike], safeguards=order, late=late)
    moved = [row["moved"] for row in job.output[:-1]]
    own = [row["moved"] for row in bare.straight(script).output[:-1]]
    cut = []
    for step in range(8, 40):
        past = moved[max(0, step - 16) : step]
        bound = statistics.mean(past) + 2.0 * statistics.stdev(past)
        if moved[step] > bound * 0.999:
            cut.append(step)
            assert moved[step] == pytest.approx(bound, rel=1e-3)
    assert {24, 25} <= set(cut) and moved[: min(cut)] == own[: min(cut)]
    assert job.column("update_norm") == pytest.approx(moved, rel=1e-4)
    assert job.frames[-1]["update_clip_rate"] == pytest.approx(100 * len(cut) / 40)


@DEVICES
def test_what_is_not_finite_is_zeroed_and_the_rest_applied(probed, late):
    order = {"zero_nonfinite": {"max": 2, "per": 100}, "skip_nonfinite": {"max": 3, "per": 100}}
    drill = [{"fault": "nan_grad", "step": 8, "params": {}}]
    job = probed.straight(loop(), drills=drill, safeguards=order, late=late)
    assert all(row["finite"] and row["moved"] > 0 for row in job.output[:-1])
    assert [s for s, fired in enumerate(job.column("gradients_zeroed")) if fired] == [8]
    assert math.isnan(job.frames[8]["grad_global_norm"]) and job.frames[-1]["steps_seen"] == 30
    said = [n.data["order"] for n in job.notices if n.kind == "safeguard"]
    assert said == ([] if late else ["zero_nonfinite"])
    assert "zero_nonfinite" not in job.segment().status()["unavailable"]


@DEVICES
def test_zeroing_has_a_cap(probed, late):
    """A run that is not finite for good takes its course after `max` steps, on a device too."""
    script = loop(
        12, after="model[0].weight.register_hook(lambda g: g * math.nan) if step > 5 else 0"
    )
    order = {"zero_nonfinite": {"max": 2, "per": 100}}
    job = probed.straight(script, safeguards=order, late=late)
    assert [row["finite"] for row in job.output[:-1]] == [True] * 9 + [False] * 3
    assert sum(job.column("gradients_zeroed")) == 2


SCALED = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
for step in range(16):
    if step in (5, 10):
        barrier(f"go{step}")
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(8, 4)).pow(2).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_the_loss_scale_starts_again(probed):
    job = probed.start(SCALED)
    orders = {"go5": 64, "go10": None}
    acks = [job.order("loss_scale", at, scale=scale) for at, scale in orders.items()]
    probed.wait(job)
    assert [ack.result for ack in acks] == [
        {"loss_scale": 64.0, "backoff": 0.5},
        {"loss_scale": 1024.0, "backoff": 0.5},
    ]
    first, second = (ack.step + 1 for ack in acks)
    scales = [1024.0] * first + [64.0] * (second - first) + [1024.0] * (16 - second)
    assert job.column("loss_scale") == scales


def test_an_update_that_an_order_skips_is_no_overflow(probed):
    job = probed.start(SCALED)
    job.go("go10")
    assert job.order("skip_step", "go5", count=2).ok
    probed.wait(job)
    assert sum(job.column("update_skipped")) == 2 and set(job.column("overflow")) == {0.0}


def test_no_more_updates_are_skipped_than_allowed(probed):
    job, acks = probed.start(loop(40, before="barrier('more') if step == 20 else 0")), []
    for name, orders in (
        ("go", [{"count": 4}, {"count": 2, "most": 3}]),
        ("more", [{"count": 2}, {"count": 5, "most": 10}]),
    ):
        job.reached(name)
        keys = [job.send("skip_step", **args) for args in orders]
        job.go(name)
        acks += [job.answer(key) for key in keys]
    probed.wait(job)
    assert [ack.ok for ack in acks] == [False, True, False, True]
    assert "skip_step of 4: 3 updates may be skipped in 128 steps, and 0 were" in acks[0].error
    assert "skip_step of 2" in acks[2].error and "2 were" in acks[2].error
    assert sum(job.column("update_skipped")) == 2 + 5


def test_sampling_is_raised_for_a_while(probed):
    script = loop(220)
    sets = {"gradients": 50, "activations": 0, "share": 1e-9}
    order = ("raise_sampling", {"every": 1, "steps": 150})
    job, ack = probed.ordered(script, order, sampling=sets)
    first = ack.step + 1
    assert ack.result["raised"] == [
        "checksums",
        "attention",
        "routing",
        "routers",
        "weights",
        "gradients",
    ]
    assert ack.result["sampling"]["activations"] == 0
    assert job.kinds().count("collector-off") == 0
    std = [f["step"] for f in job.frames if "layer_weight_std.0" in f]
    assert set(std) >= set(range(first + 1, first + 140)) and max(std) <= first + 151


def traces(job):
    found = sorted((job.folder / "incidents" / "inc-1").glob("*"))
    return {path.name: json.loads(path.read_text()) for path in found}


def test_a_profile_is_a_trace_of_the_next_steps(probed, bare):
    """In the directory of the incident, with the operations of the job; weights are the same."""
    script = loop()
    again = ("profile", {"incident": "inc-1", "steps": 1})
    first = ("profile", {"incident": "inc-1", "steps": 3})
    job, ack, second = probed.ordered(script, first, again)
    first = ack.step + 1
    name = f"profile-{first}-rank-0.json"
    assert ack.result["path"] == str(job.folder / "incidents" / "inc-1" / name)
    assert not second.ok and "being taken already" in second.error
    trace = traces(job)[name]["traceEvents"]
    steps = [event for event in trace if event.get("name", "").startswith("Optimizer.step#")]
    assert len(steps) == 3
    (said,) = [notice for notice in job.notices if notice.kind == "note"]
    assert said.data["path"] == ack.result["path"] and said.data["steps"] == 3
    assert said.data["bytes"] == Path(said.data["path"]).stat().st_size
    assert job.output[-1] == bare.straight(script).output[-1]


@pytest.mark.parametrize(
    ("verb", "args", "says"),
    [
        ("clip", {"max_norm": -1}, "a norm above 0"),
        ("loss_scale", {"scale": 64}, "no GradScaler"),
        ("raise_sampling", {"every": 5, "steps": 5, "sets": ["dreams"]}, "no set 'dreams'"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(probed, verb, args, says):
    job, ack = probed.ordered(loop(8), (verb, args))
    assert not ack.ok and says in ack.error
    assert len(job.frames) == 8 and "in_force" not in job.segment().status()


@DEVICES
def test_a_tool_that_never_binds_changes_no_bit(probed, bare, late):
    script = loop(60, "AdamW(model.parameters(), lr=1e-3)", clip=OWN_CLIP)
    orders = {
        "zero_nonfinite": {"max": 3, "per": 128},
        "update_clip": {"window": 128, "sigma": 100.0},
    }
    job, *acks = probed.ordered(
        script,
        ("clip", {"max_norm": 1e6, "steps": 0}),
        ("update_clip", {"window": 16, "sigma": 100.0, "steps": 20}),
        ("raise_sampling", {"every": 2, "steps": 20}),
        safeguards=orders,
        late=late,
    )
    assert all(ack.ok for ack in acks)
    assert job.output[-1] == bare.straight(script).output[-1]
    assert job.err == "" and set(job.kinds()) <= {"sampling"}  # less of it on a busy machine
