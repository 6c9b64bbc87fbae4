"""Where going back would not be exact it is refused, with one sentence, and nothing is changed."""

import sys

import pytest

from tests.support.savepoint_jobs import of_kind

pytestmark = pytest.mark.slow

PREAMBLE = """
import asyncio, itertools, json, os, pathlib, sys, threading, torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train_step():
    loss = model(torch.ones(4)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()

"""
FOR = "drives the step from a for statement, whose iterator cannot be rewound"
GENERATOR = "makes the step inside the generator or coroutine"
STUCK = [
    (
        """
for step in range(9):  # here
    train_step()
""",
        FOR,
    ),
    (
        """
def steps():
    n = 0
    while n < 9:
        train_step()  # here
        n += 1
        yield n

iterator = steps()
while next(iterator) < 9:
    pass
""",
        f"{GENERATOR} 'steps'",
    ),
    (
        """
def main():
    n = 0
    while n < 9:
        train_step()
        n += 1

thread = threading.Thread(target=main, name="trainer")
thread.start()
thread.join()
""",
        "makes the step in the thread 'trainer'; only the main thread can be rolled back",
    ),
    (
        """
home = pathlib.Path(__file__ + ".d") / "site-packages"
home.mkdir(parents=True)
code = ["def fit(step):", "    n = 0", "    while n < 9:", "        step()", "        n += 1"]
(home / "trainerlib.py").write_text(os.linesep.join(code))
sys.path.insert(0, str(home))
import trainerlib
trainerlib.fit(train_step)
""",
        "trainerlib.py:4 belongs to a library, whose loop cannot be rolled back; "
        "relaunch resumes from a checkpoint of its own",
    ),
]
UNSAVED = [
    (
        """
def step_in_backward(parameter):
    optimizer.step()
    optimizer.zero_grad()

model.weight.register_post_accumulate_grad_hook(step_in_backward)
n = 0
while n < 9:
    model(torch.ones(4)).sum().backward()
    n += 1
""",
        "the step is made inside backward, which cannot be undone",
    ),
    (
        """
n = 0
model.odd = nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)
while n < 9:
    train_step()
    n += 1
""",
        "Linear.odd is a Parameter on cpu, laid out as torch.sparse_coo; only dense tensors on CPU "
        "or CUDA can be saved",
    ),
]


@pytest.mark.parametrize(("code", "reason"), STUCK)
def test_a_loop_that_cannot_be_rewound_keeps_its_place(jobs, code, reason):
    """Savepoints hold the weights from then on; only a rewind is refused."""
    code = PREAMBLE + code + "print(json.dumps('done'))\n"
    refused = {"at": 7, "before": 6, "rng": "restore", "loop": "auto"}
    taken = {"at": 8, "before": 7, "rng": "keep", "loop": "auto"}
    done, events = jobs.run(code, every=2, rollbacks=[refused, taken])
    lines = [i for i, line in enumerate(code.splitlines(), 1) if line.endswith("# here")]
    (refusal,), (restored,) = of_kind(events, "refused"), of_kind(events, "restored")
    assert done == "done" and refusal.endswith(f":{lines[0]} {reason}" if lines else reason)
    assert (restored["step"], restored["loop"], restored["why_keep"]) == (6, "keep", refusal)
    assert [taken["step"] for taken in of_kind(events, "taken")][:4] == [0, 2, 4, 6]


@pytest.mark.parametrize(("code", "reason"), UNSAVED)
def test_weights_that_cannot_be_copied_are_not_saved(jobs, code, reason):
    done, events = jobs.run(PREAMBLE + code + "print(json.dumps('done'))\n", every=2)
    assert done == "done"
    assert len(of_kind(events, "refused")) >= 2 and set(of_kind(events, "refused")) == {reason}
    assert events[-1] == {"end": []}


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="locals() is a copy from 3.13 on")
def test_variables_that_locals_handed_out_are_not_touched(jobs):
    """Reading a frame's variables would change a dict that the job got from locals()."""
    code = """
def main():
    n = 0
    settings = locals()
    while n < 9:
        train_step()
        n += 1
    return sorted(settings)

print(json.dumps(main()))
"""
    back = {"at": 7, "before": 6, "rng": "keep", "loop": "auto"}
    keys, events = jobs.run(PREAMBLE + code, every=2, rollbacks=[back])
    assert keys == ["n"]
    assert "calls locals()" in of_kind(events, "restored")[0]["why_keep"]


WHILE = """
n = 0
while n < 12:
    train_step()
    n += 1
"""
CHANGED = [
    (
        """
n = 0
while n < 12:
    if n < 6:
        train_step()
    else:
        train_step()
    n += 1
""",
        7,
        "the savepoint was taken at another place of the program than",
    ),
    (WHILE, 0, "there is no savepoint before step 0; the oldest is of step 0"),
    (
        # A new one at the address of the old one, which is all that an id tells.
        "optimizer.add_param_group({'params': [nn.Parameter(torch.zeros(2))]})\n"
        "spare, ones = optimizer.param_groups[1]['params'], torch.ones(2)\n"
        + WHILE
        + """    if n == 6:
        number, spare[0] = id(spare[0]), None
        made = [nn.Parameter(ones)]
        while id(made[-1]) != number and len(made) < 9999:
            made.append(nn.Parameter(ones))
        spare[0] = made[-1]
""",
        7,
        "the parameters of SGD were replaced since the savepoint",
    ),
    (
        WHILE + "    if n == 6: model.weight = nn.Parameter(torch.zeros(1, 4))\n",
        7,
        "Linear.weight was replaced since the savepoint",
    ),
    (
        """
def epoch(n):
    while n < 6:
        train_step()
        n += 1

for n in (0, 0):
    epoch(n)
""",
        7,
        FOR,
    ),
]


@pytest.mark.parametrize(("code", "before", "reason"), CHANGED)
def test_a_rollback_that_would_not_be_exact_changes_nothing(jobs, code, before, reason):
    code = PREAMBLE + code + "print(json.dumps([model.weight.tolist(), n]))\n"
    rollback = {"at": 7, "before": before, "rng": "restore"}
    result, events = jobs.run(code, every=5, rollbacks=[rollback])
    (refusal,) = of_kind(events, "refused")
    assert reason in refusal
    assert result == jobs.untouched(code)


def test_the_budget_keeps_fewer_and_refuses_when_not_even_one_fits(jobs):
    """Weights and gradients of the preamble's 5 parameters and one loss make 44 bytes."""
    code = PREAMBLE + WHILE + "print(json.dumps(0))\n"
    assert jobs.run(code, every=2, keep=4)[1][-1] == {"end": [4, 6, 8, 10]}
    assert jobs.run(code, every=2, keep=4, max_bytes=88)[1][-1] == {"end": [8, 10]}
    assert jobs.run(code, every=2, keep=4, max_bytes=87)[1][-1] == {"end": [10]}
    events = jobs.run(code, every=2, keep=4, max_bytes=43)[1]
    assert set(of_kind(events, "refused")) == {
        "one savepoint takes 44 bytes, more than the 43 that are allowed for all of them"
    }
    assert events[-1] == {"end": []}
