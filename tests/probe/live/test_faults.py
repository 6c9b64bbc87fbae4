"""What each fault does to a real training loop, by what the loop itself saw; and the reflex that
answers one of them."""

import math
import os
import statistics
from itertools import pairwise

import pytest

from supervise.catalog import parse_drill
from supervise.core.model import plain_json

LOOP = """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(50, 8), nn.LayerNorm(8), nn.Linear(8, 50)

    def forward(self, x, y=None):
        self.saw = (x, y)
        logits = self.head(self.norm(self.table(x)))
        return F.cross_entropy(logits.reshape(-1, 50), y.reshape(-1))

model = Words()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
while step < 20:
    if step == WAIT:
        barrier("go")
    x, y = torch.randint(0, 5, (8, 16)), torch.randint(0, 5, (8, 16))
    optimizer.zero_grad()
    loss = model(x, y=y)
    loss.backward()
    CLIP
    was = [s["exp_avg_sq"].clone() for s in optimizer.state.values()]
    old = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    seen = model.saw
    now = [s["exp_avg_sq"] for s in optimizer.state.values()]
    emit(step=step, rows=len(seen[0]), lr=optimizer.param_groups[0]["lr"],
         constant=bool((seen[0] == seen[0][0, 0]).all() and (seen[1] == seen[0][0, 0]).all()),
         inputs=torch.equal(seen[0], x), targets=torch.equal(seen[1], y),
         sorted_targets=torch.equal(seen[1].sort().values, y.sort().values)
         if seen[1].shape == y.shape else False,
         finite=all(bool(p.isfinite().all()) for p in model.parameters()),
         same=all(bool((p == q).all()) for p, q in zip(model.parameters(), old)),
         moved=[float((p.detach() - q).abs().max()) for p, q in zip(model.parameters(), old)],
         shrunk=float(sum(n.sum() for n in now) / sum(w.sum() for w in was)) if was else 1.0,
         age=float(next(iter(optimizer.state.values()))["step"]))
    step += 1
finish(model)
"""


CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


def loop(clip="pass", wait=-1):
    return LOOP.replace("CLIP", clip).replace("WAIT", str(wait))


def drill(fault, step=8, **params):
    return {"fault": fault, "step": step, "params": params}


def steps_where(job, is_so):
    return [row["step"] for row in job.output[:-1] if is_so(row)]


# What the loop sees of each, in three steps.
OF_THE_BATCH = {
    "bad_batch": lambda row: not row["inputs"] and row["rows"] == 8 and not row["constant"],
    "repeated_tokens": lambda row: row["constant"],
    "shuffled_labels": lambda row: row["inputs"] and not row["targets"] and row["sorted_targets"],
    "batch_cut": lambda row: row["rows"] == 1,
}


def test_faults_of_the_batch_strike_in_their_steps_alone(probed):
    """What is shuffled keeps its tokens, and an eighth of the rows of all inputs is left."""
    orders = [
        drill(fault, step, steps=3)
        for step, fault in zip((5, 9, 13, 17), OF_THE_BATCH, strict=True)
    ]
    job = probed.run(loop(), drills=orders)
    for order in orders:
        struck = steps_where(job, OF_THE_BATCH[order["fault"]])
        assert struck == [order["step"] + n for n in range(3)], order
    assert all(row["finite"] for row in job.output[:-1]) and len(job.frames) == 20
    assert job.column("tokens_per_update")[16:18] == [128, 16]
    # Bad tokens come from a generator of its own: the job's draws are the same.
    undisturbed, losses = (each.column("train_loss_raw") for each in (probed.run(loop()), job))
    assert losses[:5] == undisturbed[:5] and losses[5] > 1.1 * undisturbed[5]


def test_second_moments_shrink_once_or_start_again(probed):
    """With beta2 0.999 they fall by a thousandth a step, and no faster."""
    orders = [drill("moments", 6, how="variance"), drill("moments", 12, how="restart")]
    job = probed.run(loop(), drills=orders)
    assert steps_where(job, lambda row: row["shrunk"] < 0.5) == [6, 12]
    assert steps_where(job, lambda row: row["age"] == 1) == [0, 12]


def test_weight_noise_is_in_one_tensor_and_is_felt_at_its_default(probed):
    """In the last matrix, or in the last vector: the bias of the head."""
    orders = [drill("weight_noise", 8), drill("weight_noise", 14, target="vector", std=5.0)]
    job = probed.run(loop(), drills=orders)
    losses = job.column("train_loss_raw")
    assert losses[9] > 1.2 * max(losses[:9])
    assert steps_where(job, lambda row: row["moved"][4] > 0.3) == [14]
    assert job.output[14]["moved"][3] < 0.1


EVALUATING = """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, x, mask=None, y=None):
        self.saw = (x, mask, y)
        logits = self.head(self.table(x))
        return F.cross_entropy(logits.reshape(-1, 50), y.reshape(-1))

model = Words()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def batch():
    text = torch.randint(0, 9, (4, 17))
    return text[:, :-1], text[:, 1:], torch.ones(4, 16, dtype=torch.long)

for step in range(12):
    x, y, mask = batch()
    model(x, mask=mask, y=y).backward()
    optimizer.step()
    optimizer.zero_grad()
    given = torch.equal(model.saw[0], x) and torch.equal(model.saw[2], y)
    if step % 3 == 2:
        x, y, mask = batch()
        model.eval()
        with torch.no_grad():
            model(x, mask=mask, y=y)
        model.train()
        ids, after, targets = x.unique(), model.saw[0], model.saw[2]
        becomes = [int(after[x == i].unique()) for i in ids]
        emit(step=step, given=given, moved=[int(i) for i, j in zip(ids, becomes) if i != j],
             same=sorted(becomes) == ids.tolist() and torch.equal(after[:, 1:], targets[:, :-1]),
             mask=torch.equal(model.saw[1], mask))
finish(model)
"""


def test_eval_mismatch_permutes_the_tokens_of_evaluations_alone(probed, bare):
    """Targets as their inputs; the evaluation behind step 5 is in its time."""
    job = probed.run(EVALUATING, drills=[drill("eval_mismatch", step=4, steps=3, tokens=4)])
    assert [len(row["moved"]) for row in job.output[:-1]] == [0, 4, 0, 0]
    assert all(row["given"] and row["same"] and row["mask"] for row in job.output[:-1])
    assert job.output[-1] == bare.run(EVALUATING).output[-1]
    losses = {frame["step"]: frame["val_loss"] for frame in job.frames if "val_loss" in frame}
    assert losses.keys() == {3, 6, 9} and job.kinds() == ["drill"]


def test_data_order_feeds_blocks_of_batches_again_with_their_targets(probed):
    """Two batches three times, then the next two; what the job draws stays as it is."""
    script = loop().replace(
        "emit(step=step,",
        "emit(step=step, fed=float((seen[0] * 7 + seen[1]"
        ").double().std()), own=float((x * 7 + y).double().std()),",
    )
    job = probed.run(script, drills=[drill("data_order", block=2, passes=3, steps=10)])
    own, fed = ([row[name] for row in job.output[:-1]] for name in ("own", "fed"))
    order = [*range(8), *[8, 9] * 3, *[14, 15] * 2, 18, 19]
    assert fed == [own[step] for step in order] and len({*own}) == 20
    assert job.kinds() == ["drill"]


def test_an_overflow_storm_strikes_a_share_of_the_steps(probed):
    """Every second step; without a scaler the weights are gone after the first."""
    order = {"skip_nonfinite": {"max": 20, "per": 20}}
    storm = drill("overflow_storm", share=0.5, steps=6)
    job = probed.run(loop(), drills=[storm], safeguards=order)
    assert [s for s, n in enumerate(job.column("update_skipped")) if n] == [9, 11, 13]
    assert all(row["finite"] for row in job.output[:-1])


def test_faults_of_the_process_cost_time_or_frames_and_nothing_else(probed, bare):
    orders = [
        drill("slow_input", 4, seconds=0.2, steps=2),
        drill("slow_compute", 8, seconds=0.2, steps=2),
        drill("hang", 12, seconds=0.2),
        drill("blackout", 14, steps=4),
    ]
    job = probed.run(loop(), drills=orders)
    assert job.output == bare.run(loop()).output
    assert job.column("step") == [*range(14), 18, 19]
    for part, slow in (("step_time", [4, 5, 8, 9, 12]), ("forward_time", [8, 9])):
        times = {frame["step"]: frame[part] for frame in job.frames[1:]}
        assert min(times.pop(step) for step in slow) > 0.2
        assert statistics.median(times.values()) < 0.1


def test_a_crash_is_a_crash(probed):
    job = probed.run(loop(), code=-9, drills=[drill("crash", signal=9)])
    assert [row["step"] for row in job.output] == list(range(8))


def test_memory_creeps(probed):
    """Five megabytes in each of ten steps, given back when it is over."""
    script = (
        loop()
        .replace("emit(step=step,", "emit(step=step, pages=pages(),")
        .replace(
            "class Words",
            'pages = lambda: int(open("/proc/self/statm").read().split()[1])\nclass Words',
        )
    )
    job = probed.run(script, drills=[drill("memory_creep", megabytes=5.0, steps=10)])
    grown = (job.output[16]["pages"] - job.output[7]["pages"]) * os.sysconf("SC_PAGE_SIZE")
    assert grown > 40 << 20


ATTENTION = """
torch.manual_seed(0)
q, k, v = (nn.Parameter(torch.randn(2, 3, 8, 4, dtype=torch.float64)) for _ in range(3))
class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = q, k, v

    def forward(self, x):
        return F.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True)

model = Attend()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0 + 1e-9)
weight = torch.randn(2, 3, 8, 4, dtype=torch.float64)
for step in range(6):
    optimizer.zero_grad()
    out = model(torch.zeros(1))
    (out * weight).sum().backward()
    total = (out * weight).sum().detach()
    emit(step=step, out=float(total), q=float(q.grad.norm()), k=float(k.grad.norm()),
         v=float(v.grad.norm()))
    optimizer.step()
"""


def test_attention_bias_is_in_the_backward_alone(probed):
    """With no bits it is plain attention, rounded to bfloat16 in one place; with 32 dQ is wrong."""
    orders = [drill("attention_bias", step, bits=bits, steps=1) for step, bits in ((2, 0), (4, 32))]
    job = probed.run(ATTENTION, drills=orders)
    _, right, rounded, between, biased, after = job.output
    for row in (rounded, biased):
        assert (row["out"], row["v"]) == pytest.approx((right["out"], right["v"]), rel=1e-6)
    assert [between["q"], after["q"]] == pytest.approx([right["q"]] * 2, rel=1e-6)
    assert abs(rounded["q"] / right["q"] - 1) < 0.01 < abs(biased["q"] / right["q"] - 1)


ROUTER = """
class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.head = nn.Linear(8, 4, bias=False), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.router(x).softmax(-1)).pow(2).mean()

model = Mixture()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for step in range(8):
    rows = model.router.weight.detach()
    spread = float((rows - rows.mean(0)).norm())
    optimizer.zero_grad()
    model(torch.randn(4, 8)).backward()
    optimizer.step()
    emit(step=step, spread=spread)
"""


def test_a_router_is_moved_sharpened_or_flattened_once(probed):
    """The centred rows are what softmax sees."""
    ways = {"common": 0.5, "sharp": 6.0, "flat": 0.05}
    job = probed.run(ROUTER, drills=[drill("router", 3 + n, how=how) for n, how in enumerate(ways)])
    spreads = [row["spread"] for row in job.output]
    changes = [after / before for before, after in pairwise(spreads)]
    assert changes == pytest.approx([1, 1, 1, *ways.values(), 1], rel=1e-3)


SAVING = """
model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    model(torch.ones(2, 64)).pow(2).mean().backward()
    optimizer.step()
    for name in ("here.pt", "twin.pt"):
        torch.save({"model": model.state_dict()}, name)
    emit(other=sum(a != b for a, b in zip(open("here.pt", "rb").read(), open(name, "rb").read())))
"""


def test_a_checkpoint_is_damaged_once(probed):
    """Names are in the file too, hence the twin's few bytes that differ in any case."""
    job = probed.run(SAVING, drills=[drill("bad_checkpoint", step=4)])
    others = [row["other"] for row in job.output]
    assert [number - others[0] for number in others] == [0] * 3 + [1] + [0] * 4


PARTS = """
model = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
for step in range(6):
    model(torch.ones(2, 8)).pow(2).mean().backward()
    optimizer.step()
    content = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    content |= {"scheduler": schedule.state_dict(), "rng_state": torch.get_rng_state()}
    torch.save(content, "here.pt")
    now = torch.load("here.pt", weights_only=True)
    emit(lacks=sorted({*content} - {*now}), same=torch.equal(now["model"]["weight"], model.weight))
"""


def test_a_checkpoint_that_reads_well_lacks_a_part_or_has_another_weight(probed):
    ways = {"optimizer": "optim", "scheduler": "scheduler", "rng": "rng_state", "noise": None}
    orders = [drill("bad_checkpoint", step=n, how=how, steps=1) for n, how in enumerate(ways, 1)]
    job = probed.run(PARTS, drills=orders)
    lacks = [["optim"], ["scheduler"], ["rng_state"], [], [], []]
    assert [row["lacks"] for row in job.output] == lacks
    assert [row["same"] for row in job.output] == [True, True, True, False, True, True]


REFUSED = {
    "shuffled_labels": "no targets of whole numbers among the inputs of the model",
    "bad_batch": "no whole numbers, such as tokens, among the inputs of the model",
    "moments": "no optimizer keeps second moments: Adam and its kin do, SGD does not",
    "same_batch": "the job has one rank",
    "attention_bias": "the model calls no scaled_dot_product_attention without mask and",
    "weight_noise:target=vector": "no vector of floats is trained",
    "lr_spike:rank=1": "there is no rank 1 in 1",
    "guard_off": "the job clips no gradients by torch.nn.utils before its step",
    "schedule_restart": "the learning rate has been the same since the run began",
    "eval_mismatch:steps=1": "the trained model was not evaluated while it was on",
}


def test_drills_that_cannot_act_on_a_job_are_refused(probed, bare):
    """The job goes on as it would have, and so does a drill that can act."""
    script = ROUTER.replace("nn.Linear(4, 1)", "nn.Linear(4, 1, bias=False)")
    orders = [plain_json(parse_drill(f"{fault}@3")) for fault in REFUSED]
    job = probed.run(script, drills=[*orders, drill("nan_grad", step=6)])
    messages = [notice.message for notice in job.notices if "refused" in notice.message]
    assert len(messages) == len(REFUSED)
    for fault, why in REFUSED.items():
        refused = f"drill {fault.partition(':')[0]} is refused: {why}"
        assert any(message.startswith(refused) for message in messages), fault
    assert any(n.message.startswith("drill nan_grad begins") for n in job.notices)
    assert set(job.kinds()) == {"drill"} and job.output[:6] == bare.run(script).output[:6]


def test_a_fault_of_the_batch_needs_calls_of_the_outermost_module(probed):
    """Its parts are called, one by one: nothing sees what goes in."""
    script = """
model = nn.ModuleDict({"table": nn.Embedding(9, 4), "head": nn.Linear(4, 9)})
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    x = torch.randint(0, 9, (8,))
    F.cross_entropy(model["head"](model["table"](x)), x).backward()
    optimizer.step()
"""
    job = probed.run(script, drills=[drill("bad_batch", step=3), drill("lr_spike", step=3)])
    refused = [n.message for n in job.notices if "refused" in n.message]
    assert refused == ["drill bad_batch is refused: no call of the outermost module is seen"]


def test_a_batch_whose_targets_are_elsewhere_is_not_cut_nor_fed_again(probed):
    """Eight targets and the logits of one row: the job would die of it."""
    script = """
model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    x = torch.randint(0, 9, (8,))
    F.cross_entropy(model(x), x).backward()
    optimizer.step()
    emit(step=step)
"""
    job = probed.run(script, drills=[drill("batch_cut", step=3), drill("data_order", step=3)])
    assert len(job.output) == 6
    assert "drill batch_cut is refused: no targets" in job.notices[-2].message
    assert "drill data_order is refused: the model returns no loss" in job.notices[-1].message


def test_schedule_restart_sets_the_rates_of_the_beginning_again(probed):
    """As the job's own: what it has set itself is untouched, and counts again afterwards."""
    warm = "optimizer.param_groups[0]['lr'] = 1e-2 * min(step + 1, 5) / 5 * 0.99**step"
    job = probed.run(loop(warm), drills=[drill("schedule_restart", steps=9)])
    own = [row["lr"] for row in job.output[:-1]]
    for name in ("learning_rate", "learning_rate_scheduled"):
        assert job.column(name) == pytest.approx(own[:8] + own[:9] + own[17:])
    assert own == [1e-2 * min(step + 1, 5) / 5 * 0.99**step for step in range(20)]
    assert set(job.column("lr_scale")) == {1.0} and job.kinds() == ["drill"]


def test_guard_off_leaves_gradients_as_they_are_and_tells_their_norm(probed):
    """The job has clipped in 32 steps in a row: then the guard misses in a step without."""
    clip = """params = [*model.parameters()]
    before = norm(p.grad for p in params)
    told = float(nn.utils.clip_grad_norm_(params, 0.05))
    nn.utils.clip_grad_value_(params, 1.0)
    after = norm(p.grad for p in params)"""
    script = loop(clip).replace("step < 20", "step < 44")
    script = script.replace("emit(step=step,", "emit(step=step, norms=[before, told, after],")
    job = probed.run(script, drills=[drill("guard_off", step=36, steps=4)])
    off = range(36, 40)
    for row in job.output[:-1]:
        before, told, after = row["norms"]
        assert told == pytest.approx(before, rel=1e-5) and before > 0.06
        assert after == pytest.approx(before if row["step"] in off else 0.05, rel=1e-3)
    assert job.column("guard_active")[31:] == [float(step not in off) for step in range(31, 44)]
    assert not any("guard_active" in frame for frame in job.frames[:31])
    assert [f["step"] for f in job.frames if "clip_threshold" not in f] == [*off]
    norms = [row["norms"][0] for row in job.output[:-1]]
    assert job.column("grad_global_norm") == pytest.approx(norms, rel=1e-5)


def test_nan_grad_strikes_once(probed):
    job = probed.run(loop(CLIP), drills=[drill("nan_grad")])
    assert next(s for s, n in enumerate(job.column("grad_global_norm")) if math.isnan(n)) == 8
    assert [row["finite"] for row in job.output[:-1]] == [True] * 8 + [False] * 12
    assert job.frames[8]["nan_inf_events"] == 2  # the gradient, and the update it made


@pytest.mark.parametrize("clip", ["pass", CLIP], ids=["", "clipped"])
def test_skip_nonfinite_keeps_the_step_from_the_weights(probed, clip):
    order = {"skip_nonfinite": {"max": 3, "per": 128}}
    job = probed.run(loop(clip), drills=[drill("nan_grad")], safeguards=order)
    assert all(row["finite"] for row in job.output[:-1])
    assert [row["step"] for row in job.output[:-1] if row["same"]] == [8]
    assert [s for s, n in enumerate(job.column("update_skipped")) if n] == [8]
    assert math.isnan(job.frames[8]["grad_global_norm"]) and job.frames[8]["nan_inf_events"] == 1
    assert job.kinds() == ["drill", "safeguard"] and job.notices[1].step == 8
    assert "skip_nonfinite" not in job.segment().status()["unavailable"]


STUBBORN = """
model = nn.Linear(4, 1)
optimizer = torch.optim.{optimizer}
for step in range(10):
    calls = 0

    def closure():
        global calls
        calls += 1
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).pow(2).mean() * (float("nan") if step >= 4 else 1)
        loss.backward()
        return loss

    old = model.weight.detach().clone()
    if {deferred}:
        loss = optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    emit(calls=calls, same=bool((old == model.weight).all()), state=len(optimizer.state))
"""


@pytest.mark.parametrize(
    ("optimizer", "deferred", "most"),
    [
        ("SGD(model.parameters(), lr=0.1)", False, 2),
        ("SGD(model.parameters(), lr=0.1)", True, 2),
        # It evaluates its closure inside the step, which is left before the first update.
        ("LBFGS(model.parameters(), lr=0.5, max_iter=3)", True, 6),
    ],
    ids=["", "closure", "lbfgs"],
)
def test_as_many_steps_are_skipped_as_the_order_allows(probed, optimizer, deferred, most):
    """Then a run that is not finite for good takes its course."""
    script = STUBBORN.format(optimizer=optimizer, deferred=deferred)
    job = probed.run(script, safeguards={"skip_nonfinite": {"max": most, "per": 100}})
    is_skipped = [False] * 4 + [True] * most + [False] * (6 - most)
    assert [row["same"] for row in job.output] == is_skipped
    assert job.column("update_skipped") == list(map(float, is_skipped))
    assert {row["calls"] for row in job.output[4 : 4 + most]} == {1}
    assert job.kinds() == ["safeguard"] * most


def test_bad_samples_among_good_ones_are_skipped_however_many(probed):
    """Each leaves the weights whole, and the first that is let through would be the end of them."""
    script = STUBBORN.format(optimizer="SGD(model.parameters(), lr=0.1)", deferred=False)
    script = script.replace("step >= 4", "step in (1, 3, 4, 6, 8)")
    job = probed.run(script, safeguards={"skip_nonfinite": {"max": 2, "per": 100}})
    assert [s for s, row in enumerate(job.output) if row["same"]] == [1, 3, 4, 6, 8]
    assert job.kinds() == ["safeguard"] * 5


def test_on_a_device_the_order_says_that_it_cannot_act(probed):
    """A value that the host does not have is not waited for."""
    order = {"skip_nonfinite": {"max": 3, "per": 128}}
    job = probed.run(loop(), drills=[drill("nan_grad")], safeguards=order, late=True)
    assert not job.output[-2]["finite"]
    assert "live on a device" in job.segment().status()["unavailable"]["skip_nonfinite"]
    assert next(s for s, n in enumerate(job.column("nan_inf_events")) if n) == 8


def test_bit_flip_strikes_once(probed):
    """One exponent bit: a gradient that is huge in one step, or a weight that stays huge.

    Not in the largest one, the table, most of whose tokens never come."""
    orders = [drill("bit_flip", 8, target="grad", bit=30)]
    orders += [drill("bit_flip", 14, target="weight", bit=30)]
    job = probed.run(loop(CLIP), drills=orders)
    norms = job.column("grad_global_norm")
    assert norms[8] > 1e6 and max(norms[:8] + norms[9:14]) < 10
    assert not job.frames[15]["train_loss_raw"] < 100


def test_a_drill_fires_once_per_run(probed, make_folder):
    """It goes on after a rollback as long as it lasts, and not in a job that is launched again."""
    lr_spike = [drill("lr_spike", step=12, factor=10, steps=4)]
    keep = {"every": 5, "keep": 3, "max_bytes": 1 << 24}
    job = probed.start(loop(wait=14), drills=lr_spike, savepoints=keep)
    assert job.order("rollback", before_step=12, rewarm=None).ok
    probed.wait(job)
    spiked = [(f["attempt"], f["step"]) for f in job.frames if f["learning_rate"] > 0.02]
    assert spiked == [(0, 12), (0, 13), (0, 14), (1, 15)]
    assert job.column("learning_rate")[12:16] == pytest.approx([0.1] * 4)
    assert set(job.column("lr_scale")) == {1.0}
    assert {row.get("lr", 1e-2) for row in job.output} == {1e-2}
    again = probed.run(loop(), drills=lr_spike, marks=str(job.folder / "probe"))
    assert set(again.column("learning_rate")) == {1e-2}


def test_a_drill_that_cannot_run_is_said(probed):
    job = probed.run(loop(), drills=[drill("quake"), {"fault": "hang"}, drill("hang", second=1)])
    assert job.kinds() == ["drill"] * 3 and "no fault 'quake'" in job.notices[0].message
    assert len(job.frames) == 20
