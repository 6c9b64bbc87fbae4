"""Programs of unusual kinds: one that skips by itself, and a mixture of experts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SKIPS = """
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(1100):
    if os.path.exists("enough"):
        break
    bad = i in (70, 75, 76) or i > 100
    loss = (model(torch.randn(8, 4)) ** 2).mean() * (float("nan") if bad else 1.0)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        optimizer.zero_grad()
        time.sleep(0.03)
        continue
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
"""
IMPATIENT = """
version: supervise/v1
policy: impatient
mode: enforce
use: [nonfinite, hang]
budgets: {all: {max: 2, per: 5000}, rollback: {max: 2, per: 5000}}
savepoints: {every: 25, keep: 4}
override:
  hang.stalled: {after: {min: 1s, p99_multiple: 8}}
  hang.unstepped: {after: {min: 1s, p99_multiple: 16}}
"""


def test_a_job_that_skips_by_itself_is_told_and_left_alone(supervise, script, tmp_path):
    (tmp_path / "impatient.yaml").write_text(IMPATIENT)
    options = ("--policy", "impatient.yaml", "--run-dir", "run")
    running = supervise.start(*options, "--", *script(SKIPS))
    run = supervise.run_of()
    sent = lambda: [r["reason"] for r in run.kinds("notify_intent")]  # noqa: E731
    wait_until(lambda: any("no optimizer step" in reason for reason in sent()), "the message")
    wait_until(lambda: any(r["rule"] == "hang.no_step" for r in run.kinds("rule", "fired")), "it")
    (tmp_path / "enough").touch()
    running.communicate(timeout=60)

    assert running.returncode == 0 and run.actions == [] and "SEV0" not in run.severities
    fired = {r["rule"]: r["step"] for r in run.kinds("rule", "fired")}
    assert fired == {"nonfinite.contained": 70, "nonfinite.repeated": 74, "hang.no_step": 97}
    told = [record["reason"] for record in run.kinds("notify_intent")]
    (idle,) = (reason for reason in told if "no optimizer step" in reason)
    assert idle.endswith(
        "the newest 32 losses or gradients were not finite, and the job discarded them"
    )
    run.prove()


PLANNED = """
version: supervise/v1
policy: planned-early
mode: observe
use: [harm]
planned: [{from: 50, to: 200, what: other targets, expect: up}]
"""
OTHER_TARGETS = """
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(90):
    x = torch.randn(64, 4)
    loss = F.mse_loss(model(x), x[:, :1] + (5 if i >= 52 else 0) + torch.randn(64, 1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("planned", [True, False])
def test_a_planned_change_is_no_harm_in_the_first_steps_either(supervise, script, planned):
    policy = supervise.home / "planned-early.yaml"
    lines = [line for line in PLANNED.splitlines() if planned or "planned:" not in line]
    policy.write_text(chr(10).join(lines))
    run = supervise.run("--policy", policy.name, job=script(OTHER_TARGETS))

    assert run.returncode == 0
    assert {r["rule"] for r in run.kinds("rule", "fired")} >= {"harm.early"}
    assert bool(run.kinds("incident", "opened")) != planned


SINE = """
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
x = torch.linspace(-3.14, 3.14, 200)[:, None]
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for i in range(2200):
    loss = F.mse_loss(model(x), torch.sin(2 * x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
AUTOENCODER = """
encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
decoder = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 32))
x = torch.sigmoid(torch.randn(2000, 4) @ torch.randn(4, 32))
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
for i in range(500):
    batch = x[torch.randint(0, 2000, (64,))]
    mean, log = encoder(batch).chunk(2, -1)
    made = decoder(mean + torch.randn_like(mean) * (0.5 * log).exp())
    loss = 10 * F.mse_loss(made, batch, reduction="sum") / 64
    loss = loss - 0.5 * (1 + log - mean * mean - log.exp()).sum() / 64
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
EQUATION = """
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
x = torch.linspace(0, 1, 128)[:, None].requires_grad_()
ends = torch.tensor([[0.0], [1.0]])
optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")


def closure():
    optimizer.zero_grad()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    residual = bend + 9.8696 * torch.sin(3.14159265 * x)
    loss = (residual**2).mean() + 10 * (model(ends) ** 2).mean()
    loss.backward()
    return loss


for i in range(300):
    optimizer.step(closure)
"""


@pytest.mark.parametrize("program", [SINE, AUTOENCODER, EQUATION])
def test_a_healthy_run_that_converges_is_left_in_peace(supervise, script, program):
    run = supervise.run("--policy", "nano", job=script(program))

    assert run.returncode == 0 and run.intents == []
    messages = [r for r in run.kinds("notify_intent") if r["severity"] != "INFO"]
    assert len(messages) <= 1, [r["reason"] for r in messages]


TOKENS = """
import copy
STEPS = 150


class Body(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.table, self.norm = nn.Embedding(16, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, 16, bias=False)

    def forward(self, x):
        h = self.table(x)
        for block in self.blocks:
            h = h + torch.relu(block(self.norm(h)))
        return self.head(self.drop(h))


def batch():
    x = torch.randint(0, 16, (16, 8))
    y = (5 * x + 3) % 16
    return x, torch.where(torch.rand(x.shape) < 0.1, torch.randint(0, 16, x.shape), y)


def loss_of(model):
    x, y = batch()
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def train(model, optimizer, micro=1, before=lambda step: None):
    for step in range(STEPS):
        before(step)
        optimizer.zero_grad()
        for _ in range(micro):
            (loss_of(model) / micro).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        time.sleep(0.01)


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)


model = Body()
"""
OTHER_KINDS = {
    "frozen-backbone": """
model.table.requires_grad_(False), model.blocks.requires_grad_(False)
train(model, adam(model))
""",
    "lora": """
class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, h):
        return self.base(h) + self.b(self.a(h))

model.requires_grad_(False)
model.blocks = nn.ModuleList(map(Adapted, model.blocks))
train(model, adam(model))
""",
    "gan": """
maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
first, second = adam(maker), adam(judge)
for step in range(STEPS):
    fake = maker(torch.randn(32, 4))
    second.zero_grad()
    right, wrong = judge(torch.randn(32, 8)), judge(fake.detach())
    (F.softplus(-right).mean() + F.softplus(wrong).mean()).backward()
    second.step()
    first.zero_grad()
    F.softplus(-judge(fake)).mean().backward()
    first.step()
    time.sleep(0.01)
""",
    "tied-weights": """
model.head.weight = model.table.weight
train(model, adam(model))
""",
    "idle-experts": """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, h):
        gates = self.router(h).softmax(-1)
        best = gates.argmax(-1).clamp(max=1)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            mask = best == number
            if mask.any():
                out[mask] = expert(h[mask]) * gates[mask][:, number : number + 1]
        return out

model.blocks[1] = Experts()
train(model, adam(model))
""",
    "sam": """
optimizer, params = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), [*model.parameters()]
for step in range(STEPS):
    x, y = batch()
    loss = lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss().backward()
    scale = 0.05 / torch.stack([p.grad.norm() for p in params]).norm()
    uphill = [p.grad * scale for p in params]
    with torch.no_grad():
        torch._foreach_add_(params, uphill)
    optimizer.zero_grad()
    loss().backward()
    with torch.no_grad():
        torch._foreach_sub_(params, uphill)
    optimizer.step()
    time.sleep(0.01)
""",
    "accumulation": "train(model, adam(model), micro=4)",
    "ema": """
average = copy.deepcopy(model).requires_grad_(False).eval()

def follow(step):
    torch._foreach_lerp_([*average.parameters()], [p.detach() for p in model.parameters()], 0.02)
    if step % 50 == 49:
        with torch.no_grad():
            loss_of(average)

train(model, adam(model), before=follow)
""",
    "lbfgs": """
model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
x = torch.rand(1024, 2)
y = torch.sin(12 * x[:, :1]) * torch.cos(12 * x[:, 1:])

def closure():
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss

for step in range(STEPS):
    optimizer.step(closure)
    time.sleep(0.01)
""",
    "unfreezing": """
model.blocks.requires_grad_(False), model.table.requires_grad_(False)
optimizer = adam(model)

def unfreeze(step):
    for at, part in ((50, model.blocks), (100, model.table)):
        if step == at:
            optimizer.add_param_group({"params": [*part.requires_grad_(True).parameters()]})

train(model, optimizer, before=unfreeze)
""",
}
OF_THE_MACHINE = ("throughput", "probe", "hang", "hardware")  # which other work slows down


@pytest.mark.chaos
@pytest.mark.parametrize("name", OTHER_KINDS)
def test_nothing_is_said_of_a_healthy_program_of_another_kind(supervise, script, name):
    run = supervise.run("--policy", "nano", job=script(TOKENS + OTHER_KINDS[name]))

    rules = {r["rule"] for r in run.kinds("rule", "fired")}
    assert run.returncode == 0 and run.intents == []
    assert {rule for rule in rules if rule.partition(".")[0] not in OF_THE_MACHINE} == set()


LEFT_OUT = """
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model[0].parameters(), lr=0.01)
for i in range(20):
    loss = (model(torch.randn(8, 4)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_fault_of_the_wiring_is_among_the_events(supervise, script):
    supervise.run("--policy", "nano", job=script(LEFT_OUT))
    lines = supervise("events", "run").stdout.splitlines()

    (line,) = (line for line in lines if "notify_intent" in line)
    assert "SEV2 tensors of the model have gradients and are in no optimizer" in line


MOE = Path(__file__).parents[2] / "benchmarks" / "proving" / "programs" / "moe_gpt.py"
# A step of 20 ms is too short for a sample of 2 ms in every seventh.
SLOWED = """
import os, runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: time.sleep(0.04))
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.chaos
def test_layers_and_routers_are_judged_within_a_hundred_steps(supervise):
    job = [sys.executable, "-c", SLOWED, str(MOE), "--steps", "100"]
    run = supervise.run("--policy", "nano", "--mode", "shadow", job=job)
    line = json.loads(supervise("backtest", "--policy", "nano", "--json", "run").stdout)

    assert run.returncode == 0 and not line["incidents"]
    blind = {*line["unjudged"], *line["inactive"]}
    assert not blind & {"attention.logits", "attention.growth", "attention.collapse"}
    assert not blind & {"routing.starved", "routing.imbalance", "routing.dominant_expert"}
    assert not blind & {"activations.residual", "activations.outlier_rate"}
    assert not blind & {"routing.low_confidence", "routing.one_dominant"}
