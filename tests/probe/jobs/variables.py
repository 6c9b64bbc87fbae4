"""State in every corner of a script; each step's loss depends on all of it."""

import copy
import hashlib
import json
import random
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import numpy as np
import stream
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.calls = 0
        self.history = []
        self.gain = None  # a plain tensor, made on the way
        self.register_buffer("last", None)

    def forward(self, x):
        self.calls += 1
        self.history = [*self.history[-3:], self.calls]
        self.gain = torch.full((1,), 1 + self.calls / 100)
        before, self.last = self.last, x.mean(0)  # a buffer bound anew at every call
        moved = 0 if before is None else (self.last - before).abs().mean()
        return self.inner(x * self.gain) + sum(self.history) / 50 + moved


class Quiet(nn.Linear):
    """Its copies announce themselves to nobody."""

    def __setstate__(self, state):
        self.__dict__.update(state)


class Config:
    rate_changes = 0


class Sampler:
    def __init__(self):
        self.random = random.Random(4)
        self.order = list(range(20))
        self.used = set()
        self.me = self  # a cycle

    def draw(self):
        self.random.shuffle(self.order)
        self.used.add(self.order[0])
        if len(self.used) > 5:
            self.used = {self.order[1]}
        return self.order[0] + len(self.used)


def counter():
    state, total = {"n": 0}, 0

    def count():
        nonlocal total
        state["n"] += 1
        total += state["n"]
        return total

    return count


def noisy():
    noisy.calls = getattr(noisy, "calls", 0) + 1
    return noisy.calls


torch.manual_seed(2)
net, sampler, count = Net(), Sampler(), counter()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
space = SimpleNamespace(step=0, nested=SimpleNamespace(best=1e9, when=(0, "never")))
window, table, by_kind = deque(maxlen=4), OrderedDict(), defaultdict(list)
tally, moments, scalar = Counter(), np.zeros(3), np.float64(0.0)
reused, pair, objects = torch.zeros(8), (0, torch.zeros(1)), [SimpleNamespace(n=0), net]
alias, losses, wide = window, [], torch.zeros(400_000)
fixed, big, ema = torch.randn(400_000), np.zeros(500_000, np.float32), copy.deepcopy(Quiet(4, 4))

while space.step < 30:
    x = stream.get_batch()
    scalar = scalar + np.float64(0.5)
    extra = sampler.draw() + count() + noisy() + len(window) + len(by_kind) + tally["steps"]
    extra += next(iter(table), 0) + getattr(space, "bonus", 0) + globals().get("late", 0)
    extra += float(big[7] + fixed[space.step] + ema.weight.detach().sum())
    extra += float(moments.sum() + scalar) + pair[0] + objects[0].n + Config.rate_changes
    reused.copy_(x[0])
    loss = (net(x) + extra / 1000 + reused + pair[1] - 1).square().mean() + wide[space.step]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    value = loss.item()
    losses.append(value)
    window.append(value)
    table[space.step % 7] = value
    table.move_to_end(space.step % 7)
    by_kind[space.step % 3].append(value)
    tally.update(steps=1)
    big += 0.1
    with torch.no_grad():
        ema.weight.add_(value / 100)
    moments[space.step % 3] += 0.1
    pair = (pair[0] + 1, pair[1] + 0.01)
    objects[0].n += 1
    wide[space.step + 1] += 0.1 * value
    if value < space.nested.best:
        space.nested.best, space.nested.when = value, (space.step, "now")
    if space.step % 4 == 3:
        Config.rate_changes += 1
        net.inner.bias.requires_grad_(not net.inner.bias.requires_grad)
    if space.step == 14:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.5})
        late = space.bonus = 1
        optimizer.state.clear()
    space.step += 1

also = [sorted(sampler.used), sampler.order, list(alias), list(table.items()), dict(by_kind)]
also += [
    tally["steps"],
    moments.tolist(),
    float(scalar),
    net.calls,
    net.history,
    len(noisy.__dict__),
]
also += [space.nested.best, space.nested.when, stream.position, stream.counts, alias is window]
also += [len(optimizer.param_groups), net.last.tolist(), wide.tolist()[:40], sampler.me is sampler]
weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
print(json.dumps({"losses": losses, "sha": weights.hexdigest(), "also": also}))
