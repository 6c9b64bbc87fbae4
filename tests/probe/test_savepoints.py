"""Rollback in process is bit-exact: a job that went back ends as one that never left.

Every job under `jobs/` is a real script that knows nothing of savepoints. It is run twice: straight
through, and with rollbacks on the way; final weights (sha256), the loss of every step and the
script's own counters must be equal.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROBE = HERE.parents[1] / "probes" / "supervise_probe"
START = """
import sys
path, name = sys.argv[1:3]
with open(path) as file:
    code = compile(file.read(), name, "exec")
exec(code, {"__name__": "__main__"})
"""


class Jobs:
    """Runs scripts in forks of one process that has torch imported."""

    def __init__(self, folder):
        self.folder = folder
        self.numbers = itertools.count()
        self.straight = {}
        driver = [str(HERE / "savepoint_driver.py"), str(PROBE / "savepoint_driver.py")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROBE.parent)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *driver],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, script, *argv, **plan):
        """Returns (what the script printed, the events at its boundaries)."""
        out = self.folder / str(next(self.numbers))
        path = HERE / "jobs" / script
        if "\n" in script:
            path = out.with_suffix(".py")
            path.write_text(script)
        job = {"script": str(path), "argv": argv, "plan": plan, "out": str(out)}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "0\n"
        events = out.with_suffix(".events").read_text().splitlines()
        return json.loads(out.read_text()), [json.loads(line) for line in events]

    def untouched(self, script, *argv):
        """The result of a run without a single savepoint."""
        if (script, argv) not in self.straight:
            self.straight[script, argv] = self.run(script, *argv)[0]
        return self.straight[script, argv]

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    jobs = Jobs(tmp_path_factory.mktemp("jobs"))
    yield jobs
    jobs.close()


def back(at, before, rng="restore"):
    return {"at": at, "before": before, "rng": rng}


def refusals(events):
    return [event["refused"] for event in events if "refused" in event]


def restored(events):
    return [event["restored"] for event in events if "restored" in event]


@pytest.mark.parametrize(
    "script",
    [
        ("module_loop.py", "adamw"),
        ("module_loop.py", "fused"),
        ("module_loop.py", "sgd"),
        ("module_loop.py", "tensor_lr"),
        ("module_loop.py", "lbfgs"),
        ("main_function.py",),
        ("helper_step.py", "lambda", "in_place"),
        ("helper_step.py", "plateau", "in_place"),
        ("helper_step.py", "cycle", "seldom"),
        ("helper_step.py", "sequential", "seldom"),
        ("scaler.py",),
    ],
    ids="-".join,
)
def test_a_job_that_went_back_ends_as_one_that_never_left(jobs, script):
    """Two rollbacks, the second to the same savepoint, leave no trace in the result."""
    plan = {"every": 5, "keep": 3, "rollbacks": [back(18, 14), back(22, 14)]}
    result, events = jobs.run(*script, **plan)
    assert [r["step"] for r in restored(events)] == [10, 10]
    assert all(r["not_restored"] == [] for r in restored(events))
    assert result == jobs.untouched(*script)


def test_every_kind_of_variable_comes_back(jobs):
    """Counters, containers, objects, closures, globals of helper modules, plain tensors, flags."""
    plan = {"every": 4, "keep": 3, "rollbacks": [back(19, 14), back(17, 14)]}
    result, events = jobs.run("variables.py", **plan)
    assert [r["step"] for r in restored(events)] == [12, 12]
    assert all(r["not_restored"] == [] for r in restored(events))
    assert result == jobs.untouched("variables.py")


def test_keeping_the_generators_goes_on_with_other_data(jobs):
    """With rng="keep" the model goes back, but no batch that was drawn is drawn again."""
    job = PREAMBLE + (
        "drawn, step = open(__file__ + '.drawn', 'w'), 0\n"
        "def draw():\n"
        "    numbers = torch.randint(1 << 40, (2,))\n"
        "    print(numbers.tolist(), file=drawn, flush=True)\n"
        "    return numbers\n"
        "batch, kept = draw(), []\n"
        "while step < 20:\n"
        "    current, batch = batch, draw()\n"
        "    kept.append(current.tolist())\n"
        "    train_step(current.float().mean() / 2**40)\n"
        "    step += 1\n"
        "lines = open(__file__ + '.drawn').read().splitlines()\n"
        "print(json.dumps([kept, [json.loads(line) for line in lines]]))\n"
    )
    kept, drawn = jobs.run(job, every=5, rollbacks=[back(13, 12, "keep")])[0]
    assert len(drawn) == len({tuple(numbers) for numbers in drawn}) == 24
    assert kept == drawn[:11] + drawn[14:-1]
    kept, drawn = jobs.run(job, every=5, rollbacks=[back(13, 12, "restore")])[0]
    assert drawn[15:18] == drawn[12:15]
    assert kept == drawn[:12] + drawn[15:-1]


PREAMBLE = """
import itertools, json, sys, threading, torch
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
REFUSED = {
    "for": (
        "for step in range(9):\n    train_step()\n",
        1,
        "drives the step from a for statement, whose iterator cannot be rewound",
    ),
    "for_with": (
        "for step in range(9):\n  try:\n    with torch.enable_grad():\n      train_step()\n"
        "  finally: pass\n",
        1,
        "drives the step from a for statement, whose iterator cannot be rewound",
    ),
    "for_in_function": (
        "def main(n):\n    step = 0\n    for batch in itertools.repeat(1, n):\n"
        "        while step < 99:\n            train_step()\n            break\nmain(9)\n",
        3,
        "drives the step from a for statement, whose iterator cannot be rewound",
    ),
    "comprehension": (
        "losses = [train_step() for _ in range(9)]\n",
        1,
        "drives the step from a for statement, whose iterator cannot be rewound",
    ),
    "generator": (
        "def steps():\n    n = 0\n    while n < 9:\n        train_step()\n        n += 1\n"
        "        yield n\nit = steps()\nwhile next(it) < 9: pass\n",
        4,
        "makes the step inside the generator or coroutine 'steps'",
    ),
    "coroutine": (
        "import asyncio\nasync def main():\n    n = 0\n    while n < 9:\n        train_step()\n"
        "        n += 1\nasyncio.run(main())\n",
        5,
        "makes the step inside the generator or coroutine 'main'",
    ),
    "thread": (
        "def main():\n    n = 0\n    while n < 9:\n        train_step()\n        n += 1\n"
        "thread = threading.Thread(target=main, name='trainer')\nthread.start()\nthread.join()\n",
        0,
        "makes the step in the thread 'trainer'; only the main thread can be moved back",
    ),
    "expression": (
        "total, n = 0.0, 0\nwhile n < 9:\n    total += train_step()\n    n += 1\n",
        3,
        "makes the step in the middle of an expression, whose first half cannot be computed "
        "again",
    ),
    "handler": (
        "n = 0\nwhile n < 9:\n    try:\n        raise ValueError\n    except ValueError:\n"
        "        train_step()\n    n += 1\n",
        6,
        "makes the step inside an exception handler",
    ),
    "library": (
        "import os, pathlib\nhome = pathlib.Path(__file__ + '.d') / 'site-packages'\n"
        "home.mkdir(parents=True)\n"
        "(home / 'trainerlib.py').write_text('def fit(step):\\n  n = 0\\n  while n < 9:\\n"
        "    step()\\n    n += 1\\n')\nsys.path.insert(0, str(home))\nimport trainerlib\n"
        0,
        "trainerlib.fit(train_step)\n",
        0,
        "trainerlib.py:4 belongs to a library, whose loop cannot be moved back",
    ),
    "sparse": (
        "n = 0\nmodel.odd = nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)\n"
        "while n < 9:\n    train_step()\n    n += 1\n",
        0,
        "Linear.odd is a Parameter on cpu, laid out as torch.sparse_coo; only dense tensors on CPU "
        "or CUDA can be saved",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_place_that_cannot_be_gone_back_to_is_refused(jobs, case):
    """Nothing is saved where nothing could be restored, the reason is one sentence, and training
    goes on."""
    code, line, sentence = REFUSED[case]
    sentence = f":{PREAMBLE.count(NEWLINE) + line} {sentence}" if line else sentence
    done, events = jobs.run(PREAMBLE + code + "print(json.dumps('done'))\n", every=4)
    assert done == "done"
    assert refusals(events)
    assert all(refusal.endswith(sentence) for refusal in refusals(events))
    assert events[-1] == {"end": []}


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="locals() is a copy from 3.13 on")
def test_variables_that_locals_handed_out_are_not_touched(jobs):
    """Reading a frame's variables would change a dict that the job got from locals()."""
    job = PREAMBLE + (
        "def main():\n    n, settings = 0, locals()\n    while n < 9:\n        train_step()\n"
        "        n += 1\n    return sorted(settings)\nprint(json.dumps(main()))\n"
    )
    keys, events = jobs.run(job, every=4, rollbacks=[back(6, 6)])
    assert keys == []
    assert "calls locals()" in refusals(events)[0]


NEWLINE = "\n"
WHILE = "n = 0\nwhile n < 12:\n    train_step()\n    n += 1\n"
NOT_THERE = {
    "another place": (
        "n = 0\nwhile n < 12:\n    if n < 6:\n        train_step()\n    else:\n"
        "        train_step()\n    n += 1\n",
        back(7, 6),
        "the savepoint was taken at another place of the program than",
    ),
    "no savepoint": (WHILE, back(7, 0), "there is no savepoint before step 0; the oldest is of"),
    "exchanged": (
        "n = 0\nwhile n < 12:\n    train_step()\n    n += 1\n    if n == 6:\n"
        "        optimizer.param_groups[0]['params'].reverse()\n",
        back(7, 6),
        "the parameters of SGD were exchanged since the savepoint",
    ),
    "replaced": (
        "n = 0\nwhile n < 12:\n    train_step()\n    n += 1\n    if n == 6:\n"
        "        model.weight = nn.Parameter(torch.zeros(1, 4))\n",
        back(7, 6),
        "Linear.weight was replaced since the savepoint",
    ),
    "reshaped": (
        "spare = nn.Parameter(torch.zeros(2))\noptimizer.add_param_group({'params': [spare]})\n"
        "n = 0\nwhile n < 12:\n    train_step()\n    n += 1\n    if n == 6:\n"
        "        spare.data = torch.zeros(3)\n",
        back(7, 6),
        "a parameter of SGD changed its shape or type since the savepoint",
    ),
    "next epoch": (
        "def epoch(n):\n    while n % 6 < 5:\n        train_step()\n        n += 1\n    return n\n"
        "for n in (0, 6):\n    epoch(n)\n",
        back(7, 4),
        "drives the step from a for statement, whose iterator cannot be rewound",
    ),
}


@pytest.mark.parametrize("case", NOT_THERE)
def test_a_rollback_that_would_not_be_exact_changes_nothing(jobs, case):
    """The job stands elsewhere, or its objects are others: refused with one sentence, untouched."""
    code, rollback, sentence = NOT_THERE[case]
    code = PREAMBLE + code + "print(json.dumps(model.weight.tolist()))\n"
    result, events = jobs.run(code, every=3, rollbacks=[rollback])
    (refusal,) = (r for r in refusals(events))
    assert sentence in refusal
    assert result == jobs.untouched(code)


def test_an_outer_for_that_did_not_move_is_no_hindrance(jobs):
    """Within one epoch the iterator of the epochs stands still, so going back is exact."""
    code = PREAMBLE + (
        "done = []\n"
        "def epoch():\n    n, losses = 0, []\n    while n < 9:\n"
        "        losses.append(0)\n        losses[-1] = train_step()\n        n += 1\n"
        "    done.append(losses)\n"
        "def main():\n    for number in range(3):\n        epoch()\nmain()\n"
        "print(json.dumps(done))\n"
    )
    result, events = jobs.run(code, every=3, rollbacks=[back(7, 4), back(16, 16)])
    assert [r["step"] for r in restored(events)] == [3, 15]
    assert result == jobs.untouched(code)


def test_what_cannot_be_brought_back_is_named(jobs):
    """Iterators, long lists that grew, objects of libraries that changed: by name, all else is
    exact."""
    code = PREAMBLE + (
        "import fractions, queue\n"
        "class Loader:\n    def __init__(self): self.source = itertools.count()\n"
        "loader, batches = Loader(), iter(range(99))\n"
        "n, log, short, ready = 0, [0.0] * 2000, [], queue.Queue(9)\nready.maxsize = 1\n"
        "while n < 12:\n    train_step(next(batches) + next(loader.source))\n"
        "    n += 1\n    log.append(n)\n    short.append(n)\n    ready.maxsize = n\n"
        "print(json.dumps([n, len(log), short]))\n"
    )
    result, events = jobs.run(code, every=3, rollbacks=[back(7, 6)])
    (outcome,) = restored(events)
    assert sorted(outcome["not_restored"]) == ["batches", "loader.source", "log", "ready"]
    assert result == [12, 2016, list(range(1, 13))]


def test_the_budget_keeps_fewer_and_refuses_when_not_even_one_fits(jobs):
    """Weights and gradients of the preamble's 5 parameters and one loss make 44 bytes."""
    code = PREAMBLE + WHILE + "print(json.dumps(0))\n"
    assert jobs.run(code, every=2, keep=4)[1][-1] == {"end": [4, 6, 8, 10]}
    assert jobs.run(code, every=2, keep=4, max_bytes=88)[1][-1] == {"end": [8, 10]}
    assert jobs.run(code, every=2, keep=4, max_bytes=87)[1][-1] == {"end": [10]}
    events = jobs.run(code, every=2, keep=4, max_bytes=43)[1]
    assert set(refusals(events)) == {
        "one savepoint takes 0.0 MB, more than the 0.0 MB that the policy allows"
    }
    assert events[-1] == {"end": []}


def test_savepoints_keep_nothing_of_the_job_alive(jobs):
    """A model that the job deletes goes at once, and its savepoints with it, also in the middle of
    the function that ran the loop."""
    code = (
        "import gc, json, weakref, torch\nfrom torch import nn\n"
        "def main():\n"
        "    model = nn.Linear(4, 1)\n    optimizer = torch.optim.Adam(model.parameters())\n"
        "    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)\n"
        "    batch, n = torch.ones(3, 4), 0\n"
        "    things = [model, optimizer, scheduler, batch]\n    kept = {'model': model}\n"
        "    refs = [weakref.ref(x) for x in things]\n"
        "    while n < 9:\n        loss = model(batch).sum()\n        loss.backward()\n"
        "        optimizer.step()\n        scheduler.step()\n        n += 1\n"
        "    del model, optimizer, scheduler, batch, things, kept, loss\n    gc.collect()\n"
        "    print(json.dumps([r() is None for r in refs]))\n"
        "main()\n"
    )
    gone, events = jobs.run(code, every=2, rollbacks=[back(5, 5)])
    assert gone == [True] * 4
    assert len(restored(events)) == 1
    assert events[-1] == {"end": []}


def test_two_optimizers_go_back_together(jobs):
    """The state of all optimizers is covered, also of one that had not stepped yet."""
    code = PREAMBLE + (
        "other = nn.Linear(4, 1)\nsecond = torch.optim.Adam(other.parameters(), lr=0.1)\n"
        "n, losses = 0, []\nwhile n < 12:\n"
        "    loss = (model(torch.ones(4)) - other(torch.randn(4))).square().sum()\n"
        "    loss.backward()\n"
        "    if n > 4:\n        second.step()\n    optimizer.step()\n"
        "    optimizer.zero_grad(); second.zero_grad()\n"
        "    losses.append(loss.item())\n    n += 1\n"
        "print(json.dumps([losses, other.weight.tolist()]))\n"
    )
    result, events = jobs.run(code, rollbacks=[back(11, 9)], every=3)
    assert len(restored(events)) == 1
    assert result == jobs.untouched(code)


def test_a_script_started_by_python_itself_goes_back(tmp_path):
    """The same through `python train.py` with the driver in a sitecustomize, without any fork."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nos.environ.pop('PYTHONPATH')\n"
        f"sys.path.insert(0, {str(PROBE.parent)!r})\n"
        f"name = {str(PROBE / 'savepoint_driver.py')!r}\n"
        f"code = compile(open({str(HERE / 'savepoint_driver.py')!r}).read(), name, 'exec')\n"
        "scope = {'__name__': 'driver'}\nexec(code, scope)\n"
        "plan = {'every': 5, 'rollbacks': [{'at': 18, 'before': 14, 'rng': 'restore'}]}\n"
        "scope['install'](plan if sys.argv[-1] == 'back' else {}, open('events', 'w'))\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", str(HERE / "jobs" / "main_function.py")]
    outputs = [
        subprocess.run(
            [*command, mode], cwd=tmp_path, env=environment, check=True, stdout=subprocess.PIPE
        ).stdout
        for mode in ("straight", "back")
    ]
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [r["step"] for r in restored(events)] == [10]
    assert outputs[0] == outputs[1]
