"""Rollback in process is bit-exact: a job that went back ends as one that never left.

Every job under `jobs/` is a real script that knows nothing of savepoints. It is run twice: straight
through, and with rollbacks on the way; final weights (sha256), the loss of every step and the
script's own counters must be equal.
"""

import pytest

from tests.support.savepoint_jobs import back, of_kind

pytestmark = pytest.mark.slow

PREAMBLE = """
import itertools, json, torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train_step(factor=1.0):
    loss = model(torch.ones(4)).sum() * factor
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()

"""


@pytest.mark.parametrize(
    "script",
    [
        ("module_loop.py", "adamw"),
        ("module_loop.py", "fused"),
        ("module_loop.py", "tensor_lr"),
        ("module_loop.py", "lbfgs"),
        ("variables.py",),
    ],
    ids="-".join,
)
def test_a_job_that_went_back_ends_as_one_that_never_left(jobs, script):
    """Two rollbacks, the second to the same savepoint, leave no trace in the result."""
    plan = {"every": 5, "keep": 3, "rollbacks": [back(18, 14), back(22, 14)]}
    result, events = jobs.run(*script, **plan)
    assert [r["step"] for r in of_kind(events, "restored")] == [10, 10]
    assert all(r["not_restored"] == [] for r in of_kind(events, "restored"))
    assert result == jobs.untouched(*script)


DRAWS = """
drawn, step = open(__file__ + ".drawn", "w"), 0

def draw():
    numbers = torch.randint(1 << 40, (2,))
    print(numbers.tolist(), file=drawn, flush=True)
    return numbers

batch, used = draw(), []
while step < 20:
    current, batch = batch, draw()
    used.append(current.tolist())
    train_step(current.float().mean() / 2**40)
    step += 1
lines = open(__file__ + ".drawn").read().splitlines()
print(json.dumps([used, [json.loads(line) for line in lines]]))
"""


def test_keeping_the_generators_goes_on_with_other_data(jobs):
    """With rng="keep" the model goes back and no batch that was drawn before is used again, not
    even the one that was prefetched; with "restore" the same batches come again."""
    used, drawn = jobs.run(PREAMBLE + DRAWS, every=5, rollbacks=[back(13, 12, "keep")])[0]
    assert len({tuple(numbers) for numbers in drawn}) == len(drawn) == 24
    assert used == drawn[:11] + drawn[14:-1]
    used, drawn = jobs.run(PREAMBLE + DRAWS, every=5, rollbacks=[back(13, 12, "restore")])[0]
    assert drawn[15:18] == drawn[12:15]
    assert used == drawn[:12] + drawn[15:-1]


def test_an_outer_for_that_did_not_move_is_no_hindrance(jobs):
    code = """
done = []

def epoch():
    n, losses = 0, []
    while n < 9:
        loss = train_step()
        losses.append(loss)
        n += 1
    done.append(losses)

for number in range(3):
    epoch()
print(json.dumps(done))
"""
    plan = {"every": 3, "rollbacks": [back(7, 4), back(16, 16)]}
    result, events = jobs.run(PREAMBLE + code, **plan)
    assert [r["step"] for r in of_kind(events, "restored")] == [3, 15]
    assert result == jobs.untouched(PREAMBLE + code)


def test_what_cannot_be_brought_back_is_named(jobs):
    """Generators, data too large to copy each time, a library's objects that changed: by name; the
    rest is exact."""
    code = """
import queue
import numpy as np

class Loader:
    def __init__(self):
        self.source = forever()

def forever():
    while True:
        yield 1

loader, batches, ready = Loader(), forever(), queue.Queue()
n, log, short, large = 0, [0.0] * 2000, [], np.zeros(3_000_000)
while n < 12:
    train_step(next(batches) + next(loader.source))
    n += 1
    log.append(n)
    short.append(n)
    ready.maxsize = n
print(json.dumps([n, len(log), short]))
"""
    result, events = jobs.run(PREAMBLE + code, every=3, rollbacks=[back(7, 6)])
    (outcome,) = of_kind(events, "restored")
    assert sorted(outcome["not_restored"]) == ["batches", "large", "loader.source", "log", "ready"]
    assert result == [12, 2016, list(range(1, 13))]


def test_savepoints_keep_nothing_of_the_job_alive(jobs):
    """A model that the job deletes goes at once, and its savepoints with it, even in the middle of
    the function that ran the loop."""
    code = """
import gc, json, weakref, torch
from torch import nn

def main():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    batch, n = torch.ones(3, 4), 0
    things = [model, optimizer, scheduler, batch]
    kept = {"model": model}
    references = [weakref.ref(x) for x in things]
    while n < 9:
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
        n += 1
    del model, optimizer, scheduler, batch, things, kept, loss
    gc.collect()
    print(json.dumps([r() is None for r in references]))

main()
"""
    gone, events = jobs.run(code, every=2, rollbacks=[back(5, 5)])
    assert gone == [True] * 4
    assert len(of_kind(events, "restored")) == 1
    assert events[-1] == {"end": []}
