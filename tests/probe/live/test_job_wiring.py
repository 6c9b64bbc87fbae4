"""Wiring of a job: faults by the names of tensors, and silence about programs that are meant so."""

import pytest

STEPS = 24
COUNTS = (
    "tensors_without_gradient",
    "tensors_without_optimizer",
    "tensors_of_others",
    "modules_in_eval",
    "tensors_with_stale_gradient",
)

PREAMBLE = """
import copy
from torch.utils.checkpoint import checkpoint

class Body(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.table, self.norm = nn.Embedding(16, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, 16)

    def features(self, x):
        h = self.norm(self.table(x))
        for block in self.blocks:
            h = h + torch.relu(block(h))
        return self.drop(h)

    def forward(self, x):
        return self.head(self.features(x))

def batch():
    x = torch.randint(0, 16, (16, 9))
    return x[:, :-1], x[:, 1:]

def loss_of(logits, y):
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))

def train(model, *optimizers, forward=None, before=lambda step: None):
    for step in range(STEPS):
        before(step)
        x, y = batch()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of((forward or model)(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()

STEPS, adam = {steps}, torch.optim.Adam
model = Body()
"""

FAULTS = {
    "reentrant-checkpoint": (
        "tensors_without_gradient",
        4,
        ["blocks.0.weight", "blocks.0.bias", "blocks.1.weight"],
        """
import warnings
warnings.simplefilter("ignore")
model.table.requires_grad_(False), model.norm.requires_grad_(False)
train(model, adam([p for p in model.parameters() if p.requires_grad]),
      forward=lambda x: model.head(checkpoint(
          lambda h: model.blocks[1](model.blocks[0](h)), model.norm(model.table(x)),
          use_reentrant=True)))
""",
    ),
    "detached-loss": (
        "tensors_without_gradient",
        9,
        ["table.weight", "norm.weight", "norm.bias"],
        """
optimizer = adam(model.parameters())
for step in range(STEPS):
    x, y = batch()
    loss = torch.tensor(loss_of(model(x), y).item(), requires_grad=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ),
    "head-replaced-later": (
        "tensors_without_optimizer",
        2,
        ["head.weight", "head.bias"],
        """
optimizer = adam(model.parameters())
model.head = nn.Linear(8, 16)
train(model, optimizer)
""",
    ),
    "model-copied-later": (
        "tensors_of_others",
        9,
        ["Body.table.weight", "Body.norm.weight", "Body.norm.bias"],
        """
optimizer = adam(model.parameters())
old, model = model, copy.deepcopy(model)
train(model, optimizer)
""",
    ),
    "model-made-anew": (
        "tensors_of_others",
        9,
        ["table.weight", "norm.weight", "norm.bias"],
        """
optimizer = adam(model.parameters())
model = Body()
train(model, optimizer)
""",
    ),
    "gradients-cleared-each-epoch": (
        "tensors_with_stale_gradient",
        4,
        ["norm.weight", "norm.bias", "blocks.0.bias"],
        """
optimizer = adam(model.parameters())
for step in range(STEPS):
    if step % 12 == 0:
        optimizer.zero_grad()
    for micro in range(2):
        x, y = batch()
        loss_of(model(x), y).backward()
    optimizer.step()
""",
    ),
    "two-optimizers-that-nothing-clears": (
        "tensors_with_stale_gradient",
        7,
        ["table.weight", "norm.weight", "norm.bias"],
        """
inputs = [*model.table.parameters(), *model.norm.parameters()]
rest = [*model.blocks.parameters(), *model.head.parameters()]
optimizers = adam(inputs), adam(rest)
for step in range(STEPS):
    x, y = batch()
    loss_of(model(x), y).backward()
    for optimizer in optimizers:
        optimizer.step()
""",
    ),
    "eval-mode": (
        "modules_in_eval",
        1,
        ["drop (Dropout)"],
        """
model.eval()
train(model, adam(model.parameters()))
""",
    ),
}

HEALTHY = {
    "frozen-backbone": """
for part in (model.table, model.norm, model.blocks):
    part.requires_grad_(False)
train(model, adam(model.parameters()))
""",
    "backbone-left-out": "train(model, adam(model.head.parameters()))",
    "backbone-in-eval": """
class Tuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.top = model, nn.Linear(8, 16)

    def forward(self, x):
        with torch.no_grad():
            h = self.body.features(x)
        return self.top(h)

tuned = Tuned()
tuned.body.eval()
train(tuned, adam(tuned.parameters()))
""",
    "gan": """
maker, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1))
first, second = adam(maker.parameters()), adam(judge.parameters())
for step in range(STEPS):
    judge.train()
    fake = maker(torch.randn(8, 4))
    second.zero_grad()
    (judge(fake.detach()).mean() - judge(torch.randn(8, 8)).mean()).backward()
    second.step()
    judge.eval()
    first.zero_grad()
    (-judge(fake).mean()).backward()
    first.step()
""",
    "idle-experts": """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

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
train(model, adam(model.parameters()))
""",
    "gradients-cleared-in-place": """
optimizer = adam(model.parameters())
for step in range(STEPS):
    for micro in range(2):
        x, y = batch()
        loss_of(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    for p in model.parameters():
        p.grad.data.zero_()
""",
    "gan-of-which-one-sees-the-other": """
maker, judge = nn.Linear(4, 8), nn.Linear(8, 1)
first, second = adam(maker.parameters()), adam(judge.parameters())
for step in range(STEPS):
    second.zero_grad()
    fake = maker(torch.randn(8, 4))
    (judge(fake.detach()).mean() - judge(torch.randn(8, 8)).mean()).backward()
    second.step()
    first.zero_grad()
    (-judge(fake).mean()).backward()
    first.step()
""",
    "gradients-copied-to-master-weights": """
wide = [p.detach().clone().requires_grad_() for p in model.parameters()]
optimizer = adam(wide)
for step in range(STEPS):
    x, y = batch()
    model.zero_grad()
    loss_of(model(x), y).backward()
    for w, p in zip(wide, model.parameters()):
        w.grad = p.grad.clone()
    optimizer.step()
    with torch.no_grad():
        for w, p in zip(wide, model.parameters()):
            p.copy_(w)
""",
    "gradients-assigned-beside-a-backward": """
other, params = nn.Linear(4, 4), list(model.parameters())
first, second = adam(other.parameters()), adam(params)
for step in range(STEPS):
    first.zero_grad()
    other(torch.randn(8, 4)).pow(2).mean().backward()
    first.step()
    x, y = batch()
    for p, gradient in zip(params, torch.autograd.grad(loss_of(model(x), y), params)):
        p.grad = gradient
    second.step()
""",
    "teacher-in-the-model": """
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = model, copy.deepcopy(model)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x) + 0.0 * target

pair = Pair()
def follow(step):
    for a, b in zip(pair.teacher.parameters(), pair.student.parameters()):
        a.data.lerp_(b.data, 0.1)
train(pair, adam(pair.parameters()), before=follow)
""",
    "two-tasks-by-turns": """
model.other = nn.Linear(8, 16)
turn = iter(range(10**6))
train(model, adam(model.parameters()), forward=lambda x: (
    model.other if next(turn) % 2 else model.head)(model.features(x)))
""",
    "a-token-for-later": """
model.mask = nn.Parameter(torch.zeros(8))
train(model, adam(model.parameters()))
""",
    "input-is-optimized": """
image = torch.zeros(4, 8, requires_grad=True)
optimizer = adam([image], lr=0.1)
for step in range(STEPS):
    optimizer.zero_grad()
    model.head(image).pow(2).mean().backward()
    optimizer.step()
""",
    "a-loop-of-ones-own": """
optimizer = adam([*model.table.parameters(), *model.head.parameters()])
rest = [*model.norm.parameters(), *model.blocks.parameters()]
def descend(step):
    for p in rest:
        if p.grad is not None:
            p.data.sub_(p.grad, alpha=0.1)
            p.grad = None
train(model, optimizer, before=descend)
""",
}

FEW = (
    *("backbone-in-eval", "gan", "gan-of-which-one-sees-the-other", "gradients-cleared-in-place"),
    *("gradients-copied-to-master-weights", "gradients-assigned-beside-a-backward"),
    *("idle-experts", "teacher-in-the-model"),
)  # not in the chaos lane


def run(probed, source, **options):
    text = PREAMBLE.replace("{steps}", str(STEPS)) + source + "\nfinish(model)\n"
    return probed.run(text, **options)


def reports(job):
    return {n.data["metric"]: n for n in job.notices if n.kind == "wiring"}


LATE = ("reentrant-checkpoint", "gradients-cleared-each-epoch")


@pytest.mark.parametrize("name", [*FAULTS, *(f"{name} as on a device" for name in LATE)])
def test_a_fault_of_the_wiring_is_reported_by_the_names_of_tensors(probed, name):
    name, _, late = name.partition(" ")
    metric, count, names, source = FAULTS[name]
    job = run(probed, source, late=bool(late))
    (report,) = reports(job).values()
    assert report.data["metric"] == metric
    assert report.data["names"] == names
    assert report.step <= 9
    counts = {m: max(f.get(m, 0.0) for f in job.frames) for m in COUNTS}
    assert counts == {**dict.fromkeys(COUNTS, 0.0), metric: float(count)}


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.chaos) for n in HEALTHY]
)
def test_a_program_that_is_meant_so_is_silent_and_keeps_its_weights(probed, bare, name):
    job = run(probed, HEALTHY[name])
    assert not reports(job)
    assert all(f.get(m, 0.0) == 0.0 for f in job.frames for m in COUNTS)
    assert any(m in f for f in job.frames for m in COUNTS)
    assert job.output[-1] == run(bare, HEALTHY[name]).output[-1]


OWN_INPUTS = """
class Sparse:
    def __init__(self, values):
        self.values = values

class SparseNorm(nn.BatchNorm1d):
    def forward(self, x):
        return Sparse(super().forward(x.values))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(8, 8), SparseNorm(8), nn.Linear(8, 1)
        self.unused = nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.norm(Sparse(self.inner(x))).values)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for _ in range(24):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).pow(2).mean().backward()
    optimizer.step()
finish(model)
"""


def test_a_norm_of_objects_without_a_length_is_called_as_without_the_probe(probed, bare):
    """As of libraries for sparse tensors, beside a layer whose calls are looked at."""
    job, straight = probed.run(OWN_INPUTS), bare.run(OWN_INPUTS)
    assert job.output == straight.output and job.err == ""
    assert len(job.frames) == 24 and "collector-off" not in job.kinds()


def test_a_model_that_an_evaluation_leaves_in_eval_mode_is_reported_within_ten_steps(probed):
    job = run(
        probed,
        """
def evaluate(step):
    if step in (9, 12):
        model.eval()
        with torch.no_grad():
            model(batch()[0])
        if step == 9:
            model.train()
train(model, adam(model.parameters()), before=evaluate)
""",
    )
    (report,) = reports(job).values()
    assert report.data["metric"] == "modules_in_eval"
    assert 12 < report.step <= 22


STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        maker = torch.Generator().manual_seed(info.id if {split} else 0)
        for number in range(100):
            yield number, torch.randint(0, 16, (9,), generator=maker)

optimizer, loader = adam(model.parameters()), torch.utils.data.DataLoader(
    Stream(), batch_size=4, num_workers=2, persistent_workers=True)


def learn(x):
    optimizer.zero_grad()
    loss_of(model(x[:, :-1]), x[:, 1:]).backward()
    optimizer.step()

"""
TAKEN = {
    "one pass": "for _, (_, x) in zip(range(12), loader): learn(x)",
    "a pass that is left early": """
for count in 3, 12:
    for _, (_, x) in zip(range(count), loader):
        learn(x)
""",
    "two loaders by turns": """
other = torch.utils.data.DataLoader(Stream(), batch_size=4, num_workers=2)
for _, (_, x), (_, y) in zip(range(12), loader, other):
    learn(x)
    learn(y)
""",
}


@pytest.mark.parametrize(
    ("is_split", "taken"), [(True, "one pass"), *((False, name) for name in TAKEN)]
)
def test_workers_that_read_the_same_stream_are_counted_and_a_split_one_is_not(
    probed, is_split, taken
):
    job = run(probed, STREAM.format(split=is_split) + TAKEN[taken])
    (copies,) = [f["stream_copies"] for f in job.frames if "stream_copies" in f]
    assert copies == (1.0 if is_split else 2.0)


def test_a_batch_that_cannot_be_listed_is_the_jobs_own_affair(probed):
    job = run(
        probed,
        """
class Lazy(dict):
    def values(self):
        raise RuntimeError("decoded by key only")

loader = torch.utils.data.DataLoader(
    torch.randint(0, 16, (48, 9)), batch_size=4, collate_fn=lambda rows: Lazy(x=torch.stack(rows)))
optimizer = adam(model.parameters())
for rows in loader:
    optimizer.zero_grad()
    loss_of(model(rows["x"][:, :-1]), rows["x"][:, 1:]).backward()
    optimizer.step()
""",
    )
    assert len(job.frames) == 12


@pytest.mark.parametrize(("rate", "low", "high"), [(1e-5, 60, 100), (1e-2, 0, 40)])
def test_the_share_of_16_bit_weights_that_updates_leave_as_they_are(probed, rate, low, high):
    """Gains near 1 stay at any usual rate."""
    train = f"train(model, adam(model.parameters(), lr={rate}))"
    job = run(probed, f"model.to(torch.bfloat16); {train}; model.float()")
    (share,) = [f["weights_rounded_away"] for f in job.frames if "weights_rounded_away" in f]
    assert low <= share <= high
    assert ("weights_rounded_away" in reports(job)) is (share > 50)


CLIPS = """
optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
for step in range(4):
    x, y = batch()
    optimizer.zero_grad()
    scaler.scale(loss_of(model(x), y)).backward()
    {unscale}
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize("unscale", ["", "scaler.unscale_(optimizer)"])
def test_a_clip_of_scaled_gradients_is_known_by_the_scale_and_its_line(probed, unscale):
    job = run(probed, CLIPS.format(unscale=unscale))
    ratios = [f["clip_ratio"] for f in job.frames]
    assert [f["clip_loss_scale"] for f in job.frames] == [1.0 if unscale else 65536.0] * 4
    assert all(ratio < 1e4 if unscale else ratio > 1e5 for ratio in ratios)
    assert ("clip_loss_scale" in reports(job)) is not bool(unscale)


@pytest.mark.parametrize("unscale", ["", "scaler.unscale_(optimizer)"])
def test_a_clip_by_value_is_compared_with_gradients_that_are_all_at_its_limit(probed, unscale):
    by_value = CLIPS.replace("clip_grad_norm_", "clip_grad_value_")
    job = run(probed, by_value.format(unscale=unscale))
    ratios = [f["clip_ratio"] for f in job.frames]
    assert all(ratio < 1e2 if unscale else ratio > 1e3 for ratio in ratios)
    if not unscale:
        assert job.frames[-1]["grad_clip_rate"] == 100.0
    assert not any("clip_threshold" in f for f in job.frames)


def test_a_clip_by_value_without_gradients_has_no_norm_and_no_limit(probed):
    """Torch may refuse it."""
    text = """
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    x, y = batch()
    optimizer.zero_grad()
    try:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    except RuntimeError:
        pass
    loss_of(model(x), y).backward()
    optimizer.step()
"""
    job = run(probed, text)
    assert len(job.frames) == 4
    assert not any(name in f for f in job.frames for name in ("clip_threshold", "clip_ratio"))


TARGETS = """
{make}
copied = copy.deepcopy(net)

optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(STEPS):
    x = torch.randn(8, 4)
    with torch.no_grad():
        target = {target}
    loss = (net(x) - target - 1.0).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {renew}
"""
PLAIN = "net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))"
WITHIN = (
    PLAIN
    + """
both = nn.ModuleDict({{"net": net}})
both["copied"] = copy.deepcopy(net)
copied = both["copied"]
"""
)
COPY = "copied.load_state_dict(net.state_dict())"
AVERAGE = "[p.data.lerp_(q.data, 0.1) for p, q in zip(copied.parameters(), net.parameters())]"


@pytest.mark.parametrize(
    ("target", "renew", "made", "moves"),
    [
        ("copied(x)", f"step == 12 and {COPY}", PLAIN, [(6, 0.0), (13, 1.0)]),
        ("both['copied'](x)", AVERAGE.replace("copied.", "both['copied']."), WITHIN, [(6, 1.0)]),
        ("copied(x)", AVERAGE, PLAIN, [(6, 1.0)]),
        ("copied(x)", "pass", PLAIN, [(6, 0.0)]),  # a teacher
        ("copied(x) if step == 4 else x[:, :2]", AVERAGE, PLAIN, []),  # evaluated now and then
        ("x[:, :2]", AVERAGE, PLAIN, []),
    ],
    ids=["copied", "within", "average", "teacher", "evaluated", "unused"],
)
def test_a_network_that_is_called_for_targets_and_moves_is_counted(
    probed, target, renew, made, moves
):
    script = TARGETS.format(make=made.format(), target=target, renew=renew)
    job = probed.run("import copy\nSTEPS = 24\n" + script)

    column = enumerate(job.column("moving_targets"))
    assert [(step, count) for step, count in column if count is not None] == moves
