"""Iterators, generators, files and queues: they stand again where they stood, or it is refused."""

import pytest

pytestmark = pytest.mark.slow

PREAMBLE = """
import itertools, json, numpy, queue, tempfile, torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seen = []


def train_step(number):
    loss = (model(torch.ones(4)) * (1 + float(number) / 9)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seen.append(int(number))


class Held:
    pass


def numbers(g):
    while True:
        yield torch.randint(99, (1,), generator=g).item()


def draws(chance):
    while True:
        yield int(99 * chance.uniform())


def squares():
    at = 0
    while True:
        at += 1
        yield at * at


def file_of_bytes():
    file = tempfile.TemporaryFile()
    file.write(bytes(range(99)))
    file.seek(0)
    return open(file.fileno(), "rb", closefd=False, buffering=8), file


def filled():
    q = queue.Queue()
    for i in range(99):
        q.put((torch.tensor([i]), i))
    return q
"""
LOOP = """
n = 0
while n < 16:
    train_step({give})
    n += 1
print(json.dumps([seen, model.weight.tolist()]))
"""
COMES_BACK = [
    ("it = itertools.count()", "next(it)"),
    ("it = iter(range(3, 99))", "next(it)"),
    ("it = enumerate(itertools.count(7, 0.5), 3)", "sum(next(it))"),
    ("it = zip(itertools.count(), iter(tuple(range(50, 99))))", "sum(next(it))"),
    ("it = map(abs, itertools.count(-5))", "next(it)"),
    ("it = Held(); it.own = [itertools.count()]", "next(it.own[0])"),
    ("it = numbers(torch.Generator().manual_seed(3))", "next(it)"),
    ("it = draws(numpy.random.default_rng(3))", "next(it)"),
    ("model.own = itertools.count()", "next(model.own)"),
    ("it = enumerate(numbers(torch.Generator().manual_seed(3)))", "sum(next(it))"),
    ("it, give = itertools.count(), itertools.count().__next__", "1"),
    ("it = filled()", "1"),
]
ROLLBACKS = {"every": 4, "rollbacks": [{"at": 10, "before": 9, "rng": "restore"}]}


def outcome(events):
    (it,) = (event for event in events if "restored" in event or "refused" in event)
    return it


@pytest.mark.parametrize(("setup", "give"), COMES_BACK)
def test_what_numbers_the_steps_goes_back_with_them(jobs, setup, give):
    code = PREAMBLE + setup + LOOP.format(give=give)
    result, events = jobs.run(code, **ROLLBACKS)
    assert "restored" in outcome(events), outcome(events)
    assert result == jobs.untouched(code)


SHARED = "and something else holds it too"
STUCK = "and it cannot be rewound"
REFUSED = [
    ("it = itertools.count(); give = it.__next__", "next(it)", "'it'", SHARED, True),
    ("it = squares()", "next(it)", "'it'", STUCK, False),
    ("it = iter([*range(12)])", "next(it, 0)", None, None, False),
    ("it = iter([*range(10)])", "next(it, 0)", "'it'", STUCK, False),
    ("it = itertools.cycle([1, 2, 3])", "next(it)", "'it'", STUCK, False),
    ("it = itertools.islice(itertools.count(), 99)", "next(it)", "'it'", STUCK, False),
    ("it, file = file_of_bytes()", "it.read(1)[0]", "'it'", STUCK, False),
    ("it = filled()", "it.get()[1]", "'it'", STUCK, False),
    ("model.own = squares()", "next(model.own)", "'own'", STUCK, False),
]


@pytest.mark.parametrize(("setup", "give", "name", "why", "numbers"), REFUSED)
def test_what_has_gone_on_and_cannot_go_back_is_refused_by_name(
    jobs, setup, give, name, why, numbers
):
    """Before anything is changed. Where other batches will do it is only named, but not what
    numbers the steps."""
    code = PREAMBLE + setup + LOOP.format(give=give)
    result, events = jobs.run(code, **ROLLBACKS)
    if name is None:
        assert "restored" in outcome(events) and result == jobs.untouched(code)
        return
    refusal = outcome(events)["refused"]
    assert refusal.startswith(f"{name} cannot be restored: ") and why in refusal
    assert result == jobs.untouched(code)
    other = [{"at": 10, "before": 9, "rng": "keep"}]
    _, events = jobs.run(code, every=4, rollbacks=other)
    assert ("refused" in outcome(events)) is numbers
