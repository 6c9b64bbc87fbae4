"""Norms and rates of parameter groups: each against a float64 computation of the job itself."""

import math

import pytest

ALWAYS = {"gradients": 1, "weights": 0, "share": 1e6}
SAMPLED = ("grad_global_norm.", "update_to_weight.")

# `watch` takes the true gradients before any clip, and `told` what the step has moved.
MODEL = """
embed, body, head = nn.Embedding(32, 16), nn.Linear(16, 24), nn.Linear(24, 32)
model = nn.Sequential(embed, body, nn.Tanh(), head)
SGD, Adam = torch.optim.SGD, torch.optim.Adam

def backward(scale=lambda loss: loss):
    x = torch.randint(0, 32, (8, 6))
    loss = F.cross_entropy(model(x).view(-1, 32), (x * 7 + 3).view(-1) % 32)
    scale(loss).backward()

def watch(members, scale=1.0):
    global row, old
    row, old = {}, {}
    every = {id(p): p for params in members.values() for p in params}.values()
    row["grad_global_norm"] = norm(p.grad for p in every if p.grad is not None) / scale
    for name, params in members.items():
        grads = [p.grad for p in params if p.grad is not None]
        if grads:
            row[f"grad_global_norm.{name}"] = norm(grads) / scale
        old[name] = [p.detach().clone() for p in params]

def told(members, **more):
    for name, params in members.items():
        moved = norm(p.detach() - q for p, q in zip(params, old[name]))
        if old[name]:
            row[f"update_to_weight.{name}"] = moved / norm(old[name])
    emit(**row, **more)
"""

TWO = """
first = SGD([{"params": [body.weight]}, {"params": [body.bias]}], lr=0.05, momentum=0.9)
second = Adam([{"params": embed.parameters()}, {"params": head.parameters()}], lr=0.01)
members = {"0": [body.weight], "1": [body.bias], "embedding": [embed.weight],
           "3": [head.weight, head.bias]}
"""

LOOPS = {
    "one-clip-over-two": TWO
    + """
for step in range(10):
    backward()
    watch(members)
    nn.utils.clip_grad_norm_(model.parameters(), torch.tensor(0.02) if step % 2 else 0.1 * step)
    for optimizer in (first, second):
        optimizer.step()
        optimizer.zero_grad()       # what the first had is gone before the second steps
    told(members)
""",
    "clip-over-two-while-scaled": TWO
    + """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
for step in range(8):
    backward(scaler.scale)
    scale = scaler.get_scale()
    watch(members, scale)
    if step % 2:
        scaler.unscale_(first)
        scaler.unscale_(second)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 50.0)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    model.zero_grad()
    told(members)
""",
    "all-then-a-part": TWO
    + """
for step in range(8):
    backward()
    watch(members)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    nn.utils.clip_grad_norm_(head.parameters(), 0.02)
    first.step()
    second.step()
    model.zero_grad()
    told(members)
""",
    "a-group-more": """
late = nn.Linear(24, 32)
first = SGD([{"params": [body.weight]}], lr=0.05)
second = Adam([{"params": embed.parameters()}, {"params": head.parameters(), "lr": 0.02}], lr=0.01)
members = {"0": [body.weight], "embedding": [embed.weight], "2": [head.weight, head.bias]}
rates = {"learning_rate": 0.05, "learning_rate.1": 0.01, "learning_rate.2": 0.02}
for step in range(10):
    if step == 3:
        first.add_param_group({"params": [body.bias], "lr": 0.5})
        members = {"0": [body.weight], "1": [body.bias], "embedding": [embed.weight],
                   "3": [head.weight, head.bias]}
        rates.update({"learning_rate.1": 0.5, "learning_rate.2": 0.01, "learning_rate.3": 0.02})
    if step == 6:           # the same parameters in the same order, in one group more
        second.param_groups[1]["params"] = [head.weight]
        second.param_groups.append({**second.param_groups[1], "params": [head.bias], "lr": 0.03})
        members.update({"3": [head.weight], "4": [head.bias]})
        rates["learning_rate.4"] = 0.03
    if step == 8:
        first.param_groups.pop()
        members = {"0": [body.weight], "embedding": [embed.weight], "2": [head.weight],
                   "3": [head.bias]}
        rates = {"learning_rate": 0.05, "learning_rate.1": 0.01, "learning_rate.2": 0.02,
                 "learning_rate.3": 0.03}
        body.bias.requires_grad_(False)
    backward()
    watch(members)
    first.step()
    second.step()
    model.zero_grad()
    told(members, **rates)
""",
    "many": """
layers = [nn.Linear(6, 6) for _ in range(10)]
model = nn.Sequential(*layers)
first = torch.optim.SGD([{"params": layer.parameters()} for layer in layers[:5]], lr=0.05)
second = torch.optim.Adam([{"params": p, "lr": 0.01 * (i + 1)} for i, p in
                           enumerate(p for layer in layers[5:] for p in layer.parameters())])
members = {str(i): list(layer.parameters()) for i, layer in enumerate(layers[:5])}
members.update({"5": [layers[5].weight], "6": [layers[5].bias]})
rates = {f"learning_rate.{5 + i}": 0.01 * (i + 1) for i in range(10)}
for step in range(6):
    (model(torch.randn(8, 6)) ** 2).mean().backward()
    watch(members)
    row["grad_global_norm"] = norm(p.grad for p in model.parameters())
    if step % 2:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    first.step()
    second.step()
    model.zero_grad()
    told(members, **rates)
""",
}

LATE = ("clip-over-two-while-scaled", "many")  # once more, as on a device


@pytest.mark.parametrize(
    ("name", "late"), [*((name, False) for name in LOOPS), *((name, True) for name in LATE)]
)
def test_each_group_is_measured_as_the_job_would(probed, bare, name, late):
    """Each frame holds what the script computes, and of the groups nothing else; the script
    computes what it does without the probe, to the bit."""
    script = MODEL + LOOPS[name]
    job = probed.run(script, late=late, sampling=ALWAYS)
    assert job.err == "" and job.kinds() == ["wiring"] * ("scaled" in name)
    assert job.output == bare.run(script).output
    assert [frame["step"] for frame in job.frames] == list(range(len(job.output)))
    for frame, row in zip(job.frames, job.output, strict=True):
        of_groups = {metric for metric in row if metric.startswith(SAMPLED)}
        kinds = tuple(metric.partition(".")[0] + "." for metric in of_groups)
        if frame["step"] < 2:  # nothing is sampled yet
            row = {metric: value for metric, value in row.items() if metric not in of_groups}
        else:
            assert {metric for metric in frame if metric.startswith(kinds)} == of_groups
        for metric, value in row.items():
            near = math.isclose(frame[metric], value, rel_tol=1e-5, abs_tol=1e-9)
            assert near, (metric, frame["step"], frame[metric], value)
