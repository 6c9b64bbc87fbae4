"""Several trainings in one process, as in a sweep or a cross-validation."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

SWEEP = """
import hashlib

teacher = torch.randn(16, 10)

def train(model, optimizer, steps):
    step = 0
    while step < steps:
        x = torch.randn(64, 16)
        loss = F.cross_entropy(model(x), (x @ teacher).argmax(1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            print("first", loss.item())
        if fold == 0 and step >= high_at:
            optimizer.param_groups[0]["lr"] = 0.05
            time.sleep(0.02)  # an order takes two polls of the frames
        step += 1

def new():
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))

high_at, results = 80 if "high" in sys.argv else 100, []
for fold in range(3):
    model = new()
    factor = 1 + fold if "kept" in sys.argv else 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 * factor)
    if "kept" in sys.argv:
        results.append((model, optimizer))
    train(model, optimizer, 100)
print("sha", hashlib.sha256(model[0].weight.detach().numpy().tobytes()).hexdigest())
"""

LATE_DISCRIMINATOR = """
import hashlib

def new(outputs):
    return torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, outputs)
    )

data = torch.randn(2048, 16) @ torch.randn(16, 16)
coder, critic = new(16), new(1)
of_coder = torch.optim.Adam(coder.parameters(), 1e-3)
of_critic = torch.optim.Adam(critic.parameters(), 1e-3)
for step in range(700):
    x = data[torch.randint(0, 2048, (64,))]
    y = coder(x)
    loss = F.mse_loss(y, x)
    if step >= 300:
        loss = loss - 0.1 * critic(y).mean()
    of_coder.zero_grad()
    loss.backward()
    of_coder.step()
    if step >= 300:
        loss = F.relu(1 - critic(x)).mean() + F.relu(1 + critic(y.detach())).mean()
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
print("sha", hashlib.sha256(coder[0].weight.detach().numpy().tobytes()).hexdigest())
"""

RATE_SEARCH = """
import copy, hashlib

teacher = torch.randn(16, 10)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))

def train(optimizer, steps, growth=1.0):
    for _ in range(steps):
        x = torch.randn(64, 16)
        loss = F.cross_entropy(model(x), (x @ teacher).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= growth
        print(loss.item())

start = copy.deepcopy(model.state_dict())
train(torch.optim.AdamW(model.parameters(), lr=1e-8), 120, 1.2)
model.load_state_dict(start)
train(torch.optim.AdamW(model.parameters(), lr=3e-3), 400)
print("sha", hashlib.sha256(model[0].weight.detach().numpy().tobytes()).hexdigest())
"""

PHASES = """
import hashlib

def new(outputs):
    return torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, outputs)
    )

policy, critic, payoff = new(4), new(1), torch.randn(8, 4)
of_policy = torch.optim.Adam(policy.parameters(), lr=3e-4)
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
for epoch in range(16):
    state = torch.randn(512, 8)
    before = torch.distributions.Categorical(logits=policy(state).detach())
    action = before.sample()
    reward = (state @ payoff).gather(1, action[:, None])[:, 0]
    advantage = (reward - critic(state)[:, 0]).detach()
    for _ in range(80):
        now = torch.distributions.Categorical(logits=policy(state)).log_prob(action)
        ratio = (now - before.log_prob(action)).exp()
        loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        of_policy.zero_grad()
        loss.backward()
        of_policy.step()
    for _ in range(80):
        loss = F.mse_loss(critic(state)[:, 0], reward)
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
print("sha", hashlib.sha256(policy[0].weight.detach().numpy().tobytes()).hexdigest())
"""

LOWERS = """\
version: supervise/v1
policy: lowers
mode: enforce
detectors: {high: {kind: threshold, metric: learning_rate, gt: 0.01}}
rules: [{id: rate, when: high, sev: SEV1, run: lower, cooldown: 100}]
budgets: {all: {max: 4, per: 10000}, lr_scale: {max: 4, per: 10000}}
escalate: {ladder: [lower, hold], reset_after: 5000}
runbooks: {lower: [lr_scale: {set: 0.5}, verify: {within: 100, clear_for: 50}]}
warmup: 10
probation: 20
"""


@pytest.fixture
def sweep(supervise, script):
    """Run it supervised, and bare if nobody acts; returns the run and the rows of its frames."""

    def watch(*args, policy="nano"):
        job = [*script(SWEEP), *args]
        run = supervise.run("--policy", policy, job=job)
        assert run.returncode == 0
        if not run.actions:
            assert run.stdout == supervise.bare(job).stdout
        return run, supervise.rows("run")

    return watch


@pytest.mark.parametrize("args", [[], ["kept"]])
def test_each_training_is_judged_by_itself(sweep, args):
    """Also where the job holds the models before, with their optimizers."""
    run, rows = sweep(*args)

    assert run.actions == [] and run.kinds("incident", "opened") == []
    told = [note["data"]["last_step"] for note in run.kinds("note", "program-replaced")]
    assert told == [99, 199]
    assert [int(row["step"]) for row in rows] == list(range(300))
    said = [line.split() for line in run.stdout.splitlines()]
    begins = [float(number) for word, number in said if word == "first"]
    assert [float(rows[at]["train_loss_raw"]) for at in (0, 100, 200)] == pytest.approx(begins)
    assert [float(rows[at]["tokens_seen"]) for at in (99, 100, 299)] == [6400, 64, 6400]
    assert [rows[at]["step_time"] for at in (0, 100, 200)] == ["", "", ""]


def test_a_discriminator_that_joins_late_begins_a_training(supervise, script):
    """As of VQGAN: the loss of the autoencoder has another term from then on."""
    job = script(LATE_DISCRIMINATOR)
    run = supervise.run("--policy", "nano", job=job)

    assert run.returncode == 0 and run.stdout == supervise.bare(job).stdout
    assert run.actions == [] and run.kinds("incident", "opened") == []
    told = [note["data"]["last_step"] for note in run.kinds("note", "program-replaced")]
    assert told == [300]


def test_a_search_for_the_rate_is_let_break_and_the_fit_behind_it_is_judged_by_itself(
    supervise, script
):
    """As of fastai and Lightning: the rate grows until the loss breaks, then weights go back."""
    job = script(RATE_SEARCH)
    run = supervise.run("--policy", "nano", job=job)

    assert run.returncode == 0 and run.stdout == supervise.bare(job).stdout
    assert run.actions == [] and run.kinds("incident", "opened") == []
    assert [note["data"]["last_step"] for note in run.kinds("note", "program-replaced")] == [119]


def test_a_job_whose_optimizers_take_turns_is_reported_once(supervise, script):
    """As of PPO: 80 steps of the policy, then 80 of the critic, whose loss is another one."""
    job = script(PHASES)
    run = supervise.run("--policy", "nano", job=job)

    assert run.returncode == 0 and run.stdout == supervise.bare(job).stdout
    assert run.actions == []
    told = [note["data"]["message"] for note in run.kinds("notify_intent")]
    titles = [message["title"] for message in told if message["severity"] != "INFO"]
    assert titles == ["optimizers of different parameters take turns"]


def test_an_incident_ends_with_its_training(sweep, supervise, tmp_path):
    policy = tmp_path / "lowers.yaml"
    policy.write_text(LOWERS)
    run, rows = sweep("high", policy=policy)

    (opened,) = run.kinds("incident", "opened")
    (closed,) = run.kinds("incident", "closed")
    over = "its training session ended after step 99; another one starts"
    assert closed["reason"] == f"closed: over: {over}"
    assert closed["incident"] == opened["incident"]
    assert run.kinds("incident", "held") == [] and run.kinds("verify", "failed") == []
    intents, commits = run.kinds("intent"), run.kinds("commit")
    assert [one["data"]["action"]["args"]["value"] for one in intents] == [0.5, 1.0]
    back = max(one["data"]["result"]["ack_step"] for one in commits)
    assert {float(row["learning_rate"]) for row in rows[back + 1 :]} == {0.003}
    told = [note["data"]["message"] for note in run.kinds("notify_intent")]
    assert [over in one["verdict"] for one in told if one["title"] == "inc-1: closed"] == [True]
    assert "; supervise why run inc-1" in run.stderr
    assert f"closed: over: {over}" in supervise("why", "--full", "run", "inc-1").stdout
    assert run.state["incidents"] == {"opened": 1, "open": None}
    run.prove()
