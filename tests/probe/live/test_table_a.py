"""Values of the optimization table: each against a float64 computation on the same step."""

import pytest

from tests.support.probed_job import check_frames

# A small language model the way people train them: accumulation, a mask, a clip, two groups of
# parameters and an embedding, a scheduler with a warm-up. `{loop}` is what differs.
MODEL = """
from functools import partial

embed, hidden, head = nn.Embedding(32, 16), nn.Linear(16, 24), nn.Linear(24, 32)
model = nn.Sequential(embed, hidden, nn.Tanh(), head)
groups = [
    {{"params": [embed.weight, hidden.weight, head.weight], "weight_decay": 0.1}},
    {{"params": [hidden.bias, head.bias], "weight_decay": 0.0}},
]
members = {{"embedding": [embed.weight], "0": [hidden.weight, head.weight],
           "1": [hidden.bias, head.bias]}}
optimizer = torch.optim.{optimizer}

def warm(step, *, num_warmup_steps, num_training_steps):
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    return (num_training_steps - step) / (num_training_steps - num_warmup_steps)

lengths = dict(num_warmup_steps=10, num_training_steps=40)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(warm, **lengths))
ema, decay, norms, losses, bits, applied = 0.0, 0.97, [], [], [], 0

def batch(size=8):
    x = torch.randint(0, 32, (size, 6))
    y = (x * 7 + 3) % 32
    y[torch.rand(size, 6) < 0.2] = -100
    return x, y

def cross_entropy(logits, y):
    return F.cross_entropy(logits.view(-1, 32), y.view(-1), ignore_index=-100)

def average(values, b):
    total = sum((1 - b) * b ** (len(values) - 1 - i) * v for i, v in enumerate(values))
    return total / (1 - b ** len(values))

def adam_ratio():
    found = []
    for p in (hidden.weight, head.weight):
        state = optimizer.state[p]
        v = state["exp_avg_sq"].double() / (1 - 0.999 ** float(state["step"]))
        found.append(math.sqrt(float((p.grad.double() ** 2 / v.clamp(min=1e-16)).mean())))
    return max(found)

def by_member(measure):
    return {{name: measure(params) for name, params in members.items()}}
"""

PLAIN = (
    MODEL.format(optimizer="AdamW(groups, lr=1e-2)")
    + """
stds, nlls = [], []
for step in range(40):
    optimizer.zero_grad()
    loss, nll, tokens = 0.0, 0.0, 0
    for micro in range(2):
        x, y = batch()
        part = cross_entropy(model(x), y) / 2
        part.backward()
        loss += part.item()
        tokens += int((y != -100).sum())
        nll += 2 * part.item() * int((y != -100).sum())
    gradients = by_member(lambda params: norm(p.grad for p in params))
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.9).item()
    ratio = adam_ratio() if step else None
    used = optimizer.param_groups[0]["lr"]
    old = {id(p): p.detach().clone() for p in model.parameters()}
    optimizer.step()
    scheduler.step()
    score = total / average(norms, 0.97) if norms else None
    losses.append(loss)
    norms.append(total)
    applied += tokens
    mean = average(losses, 0.99)
    nlls.append(nll / tokens)
    row = dict(train_loss_ema=mean, tokens_applied=applied,
               train_loss=nlls[-1], train_ppl=math.exp(average(nlls, 0.99)),
               grad_clip_rate=100 * sum(n > 0.9 for n in norms) / len(norms),
               clip_threshold=0.9, skip_reason=0)
    if score:
        row["grad_spike_score"] = score
        row["lr_phase"] = step / 10 if step < 10 else 2 + (step - 11) / 29
    if step == 10:
        row["lr_phase"] = 0.999
    if step >= 2 and step % 4 == 0:
        row["opt_state_finite"] = 1
        row["adam_rms_ratio"] = ratio
        row.update({f"grad_global_norm.{k}": v for k, v in gradients.items()})
        weight = by_member(lambda ps: norm(old[id(p)] for p in ps))
        moved = by_member(lambda ps: norm(p - old[id(p)] for p in ps))
        moved = {k: v / weight[k] for k, v in moved.items()}
        row.update({f"update_to_weight.{k}": v for k, v in moved.items()})
    if step >= 2 and step % 8 == 0:
        now = [float(p.detach().double().std()) for p in (embed.weight, hidden.weight, head.weight)]
        row.update({f"layer_weight_std.{i}": s for i, s in enumerate(now)})
        if stds:
            row["layer_weight_std"] = max(abs(a / b - 1) for a, b in zip(now, stds))
        stds = now
    emit(**row)
finish(model)
"""
)

SAMPLED = {
    "adam_rms_ratio",
    "opt_state_finite",
    "grad_global_norm.0",
    "grad_global_norm.1",
    "grad_global_norm.embedding",
    "update_to_weight.0",
    "update_to_weight.1",
    "update_to_weight.embedding",
    "layer_weight_std",
    "layer_weight_std.0",
    "layer_weight_std.1",
    "layer_weight_std.2",
}
OFTEN = {"gradients": 4, "weights": 8, "share": 1e6}


def rows(job):
    return [row for row in job.output if "sha" not in row]


def compare(job, rel=1e-5):
    """Every value that was told is in the frame of its step, and sampled ones nowhere else."""
    told = rows(job)
    check_frames(job.frames, told, rel)
    for frame, row in zip(job.frames, told, strict=True):
        assert not (SAMPLED & frame.keys()) - row.keys(), frame["step"]


@pytest.mark.parametrize("late", [False, True], ids=["cpu", "as-on-a-device"])
def test_values_under_accumulation_mask_and_clip(probed, bare, late):
    job = probed.run(PLAIN, late=late, sampling=OFTEN)
    compare(job)
    assert job.column("forwards_per_update")[1:] == [2.0] * 39
    assert job.output[-1] == bare.run(PLAIN).output[-1]
    assert job.err == "" and job.kinds() == []


AMP = """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
skips, seen = 0, []
for step in range(24):
    optimizer.zero_grad()
    tokens, overflow = 0, step in (8, 13)
    for micro in range(2):
        x, y = batch()
        part = cross_entropy(model(x), y) / 2
        worse = hidden.weight.register_hook(lambda g: g * (math.inf if overflow else 1))
        scaler.scale(part).backward()
        worse.remove()
        tokens += int((y != -100).sum())
    scale = scaler.get_scale()
    gradients = by_member(lambda params: norm(p.grad for p in params) / scale)
    left = 1.0
    CLIP
    for p in model.parameters():
        p.grad.div_(left)  # a power of two: exact
    ratio = adam_ratio() if step else None
    for p in model.parameters():
        p.grad.mul_(left)
    scaler.step(optimizer)
    scaler.update()
    skips += overflow
    applied += 0 if overflow else tokens
    total = norm([torch.tensor(v, dtype=torch.float64) for v in gradients.values()])
    row = dict(tokens_applied=applied, overflow_rate=100 * skips / (step + 1),
               skip_reason=float(overflow), overflow=float(overflow))
    if norms and not overflow:
        row["grad_spike_score"] = total / average(norms, 0.97)
    if not overflow:
        norms.append(total)
    if step >= 2 and step % 4 == 0 and not overflow:
        row["adam_rms_ratio"] = ratio
        row.update({f"grad_global_norm.{k}": v for k, v in gradients.items()})
    if step == 8:
        row.update({f"update_to_weight.{k}": 0.0 for k in members}, opt_state_finite=1)
    if seen:
        clipped = sum(limit < n < math.inf for n, limit in seen)
        row.update(clip_threshold=limit, grad_clip_rate=100 * clipped / len(seen))
    emit(**row)
finish(model)
"""
CLIP = (
    "limit = {limit}; total = nn.utils.clip_grad_norm_(model.parameters(), limit); "
    "seen.append((total.item(), limit))"
)
UNSCALED = "scaler.unscale_(optimizer); " + CLIP.format(limit=0.8)
SCALED = "left = scale; " + CLIP.format(limit=900.0)


@pytest.mark.parametrize(
    ("optimizer", "late", "clip"),
    [
        ("AdamW(groups, lr=1e-2)", False, UNSCALED),
        ("AdamW(groups, lr=1e-2)", True, SCALED),
        ("AdamW(groups, lr=1e-2, fused=True)", True, "left = scale"),
    ],
    ids=["unscaled", "clipped-while-scaled-as-on-a-device", "fused-as-on-a-device"],
)
def test_a_scaler_changes_no_value(probed, bare, optimizer, late, clip):
    """Everything comes unscaled; an overflow is a skipped step and enters no average."""
    script = MODEL.format(optimizer=optimizer) + AMP.replace("CLIP", clip)
    job = probed.run(script, late=late, sampling={**OFTEN, "weights": 0})
    check_frames(job.frames, rows(job), rel=1e-5)
    assert job.output[-1] == bare.run(script).output[-1]
    metrics = [(notice.kind, notice.data["metric"]) for notice in job.notices]
    assert metrics == ([("wiring", "clip_loss_scale")] if clip == SCALED else [])


def test_a_broken_moment_is_found_in_one_round_and_stays_found(probed):
    """Wherever it is; once it is healed the value is 1 again."""
    script = """
import sys
state = sys.modules["_supervise_probe.collectors.training_state"]
state.BUDGET, state.PIECE = 40, 16
model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
bad = {10: (0, "exp_avg", math.nan), 40: (2, "exp_avg_sq", -1e-12), 70: (1, "exp_avg", math.inf)}
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
    if step in bad:
        index, key, value = bad[step]
        moment = list(optimizer.state.values())[index][key]
        sound = moment.clone()
    if step - 20 in bad:
        moment.copy_(sound)
    optimizer.step()
    if step % 30 >= 10 and step >= 10:
        moment.view(-1)[-1] = value
    with torch.no_grad():  # NaN as a rate of 0 would write it
        for p in model.parameters():
            p.nan_to_num_(0.1)
"""
    job = probed.run(script, sampling={"gradients": 1, "weights": 0, "share": 1e6})
    values = job.column("opt_state_finite")
    for begin in (10, 40, 70):
        assert values[begin - 8 : begin] == [1.0] * 8
        late = values[begin : begin + 20].index(0.0)
        assert late <= 8  # 248 values in both moments, 40 a sample
        assert values[begin + late : begin + 20] == [0.0] * (20 - late)
        assert values[begin + 21 : begin + 29] == [1.0] * 8


def test_updates_of_large_groups_are_told_by_a_sample(probed, bare):
    """Within a tenth, for each of two optimizers."""
    script = """
import sys
if "_supervise_probe" in sys.modules:
    sys.modules["_supervise_probe.collectors.gradient"].EXACT = 20_000
parts = first, second = nn.Linear(256, 256), nn.Linear(256, 64)
one = torch.optim.AdamW(first.parameters(), lr=1e-3)
two = torch.optim.SGD(second.parameters(), lr=1e-2, momentum=0.9)
for step in range(9):
    one.zero_grad()
    two.zero_grad()
    second(first(torch.randn(16, 256)).tanh()).pow(2).mean().backward()
    old = [[p.detach().clone() for p in part.parameters()] for part in parts]
    one.step()
    two.step()
    emit(moved=[norm(p - q for p, q in zip(part.parameters(), was)) / norm(was)
                for part, was in zip(parts, old)])
finish(first, second)
"""
    job = probed.run(script, sampling=OFTEN)
    for step in (4, 8):
        frame, told = job.frames[step], job.output[step]["moved"]
        moved = [frame[f"update_to_weight.{index}"] for index in (0, 1)]
        assert moved == pytest.approx(told, rel=0.1) and moved != pytest.approx(told, rel=1e-9)
        assert frame["opt_state_finite"] == 1
    assert job.output[-1] == bare.run(script).output[-1]
