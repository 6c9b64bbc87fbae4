"""Every step knows where its data came from, whoever says it and however the loader is read."""

import pytest

from supervise_probe.collectors import SourceMix

# Each sample is (number of its shard, place in it), so the script knows what it trained on.
SETUP = """
import sys
import supervise_probe
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

def named(number):
    return f"data/{int(number)}.tar"

def train(batches):
    for x in batches:
        model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    rows = torch.cat(list(batches)).tolist()
    emit(shards=sorted({named(row[0]) for row in rows}), first=rows[0][1])

def sample(index):
    return torch.tensor([index // 5, index % 5], dtype=torch.float32)

class Plain(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return sample(index)

def finish_tape():
    tape = sys.modules["_supervise_probe"]._probe.parts.rank.history.seen if PROBED else []
    emit(tape=list(tape))
    finish(model)

PROBED = "_supervise_probe" in sys.modules
"""


CALLS = """
for step in range(12):
    batches = []
    for micro in range(2):
        index = 4 * step + 2 * micro
        supervise_probe.shard(named(index // 5), index % 5)
        if index // 5 != (index + 1) // 5:
            supervise_probe.shard(named((index + 1) // 5))
        batches.append(torch.stack([sample(index), sample(index + 1)]))
    train(batches)
    with torch.no_grad():
        supervise_probe.shard("evaluation.tar", 3)
finish_tape()
"""
KEYS = """
class Rows(Plain):
    def __getitem__(self, index):
        x = sample(index)
        return {"x": x, "shard": named(x[0]), "offset": int(x[1])}

for batch in DataLoader(Rows(), batch_size=4):
    train([batch["x"]])
finish_tape()
"""
WEB = """
class Web(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        for index in range(40):
            if index // 10 % info.num_workers == info.id:
                x = sample(index)
                supervise_probe.shard("not heard of")
                yield {"x": x, "__url__": named(x[0]), "__key__": f"{index % 5:06d}"}

for batch in DataLoader(Web(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
    train([batch["x"]])
finish_tape()
"""
STANDS = """
class Stands(IterableDataset):
    def __iter__(self):
        for shard in range(6):
            self.current_shard = named(shard)
            for self.current_offset in range(0, 5):
                yield sample(5 * shard + self.current_offset)

    @property
    def shard_name(self):
        raise SystemExit("a property of the job was run")

class Wrapped(IterableDataset):
    def __init__(self):
        self.dataset = Stands()

    def __iter__(self):
        return iter(self.dataset)

for x in DataLoader(Wrapped(), batch_size=1):
    train([x])
finish_tape()
"""
INSIDE = """
class Says(Plain):
    def __getitem__(self, index):
        x = sample(index)
        supervise_probe.shard(named(x[0]), int(x[1]))
        return x

loader = DataLoader(Says(), batch_size=4)
"""
AHEAD = """
def ahead(loader):  # as accelerate reads a loader
    following = iter(loader)
    batch = next(following)
    for after in following:
        yield batch
        batch = after
    yield batch

for epoch in range(2):
    for x in ahead(loader):
        train([x])
        for _ in DataLoader(Plain(), batch_size=20):
            with torch.no_grad():
                model(_)
finish_tape()
"""
LEFT_OUT = """
for number, x in enumerate(loader):
    if number in (3, 4, 7):
        continue
    train([x])
finish_tape()
"""
WAYS = {
    "calls": CALLS,
    "keys-of-a-batch": KEYS,
    "webdataset-with-workers": WEB,
    "attributes-of-a-dataset": STANDS,
    "read-ahead": INSIDE + AHEAD,
    "batches-left-out": INSIDE + LEFT_OUT,
}


@pytest.mark.parametrize("way", WAYS)
def test_each_step_names_the_shards_that_it_trained_on(probed, bare, way):
    """Names beside the fingerprint, number and offset in the frame; -1 where there are several."""
    job = probed.run(SETUP + WAYS[way])
    *steps, end, weights = job.output
    assert way != "calls" or bare.run(SETUP + WAYS[way]).output[-1] == weights
    tape = end["tape"]
    assert [batch["step"] for batch in tape] == list(range(len(steps))) and len(steps) >= 5
    assert [sorted({o["shard"] for o in batch["shards"]}) for batch in tape] == [
        row["shards"] for row in steps
    ]
    names = {}
    for frame, row in zip(job.frames, steps, strict=True):
        if len(row["shards"]) > 1:
            assert frame["batch_shard"] == -1 and "batch_offset" not in frame
        else:
            names.setdefault(frame["batch_shard"], set()).update(row["shards"])
            assert frame["batch_offset"] == row["first"]
    assert all(len(found) == 1 for found in names.values())
    assert len(names) >= 3
    told = {k: v for n in job.notices if n.kind == "shard" for k, v in n.data["shards"].items()}
    status = job.segment().status()["shards"]
    for number, (name,) in names.items():
        assert {told.get(f"{number:.0f}", name), status.get(f"{number:.0f}", name)} == {name}
    assert set(told) | set(status) >= {f"{number:.0f}" for number in names}


def test_what_does_not_come_out_is_not_claimed(probed):
    """A loader that was read to its end before the first step: no shard, and no wrong one."""
    job = probed.run(SETUP + INSIDE + "for x in list(loader):\n    train([x])\nfinish_tape()\n")
    assert len(job.frames) == 10
    assert set(job.column("batch_shard")) == {None}


ENDLESS = """
for step in range(1100):
    supervise_probe.shard("x" * 500 + f"{step}.tar", step)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


def test_a_job_with_endless_names_does_not_fill_the_record(probed):
    """A new shard in each step: letters of bounded number and size."""
    job = probed.run(SETUP + ENDLESS, slots=2048)
    job.poll()  # not all are read at once
    assert job.column("batch_shard") == job.column("batch_offset") == [*range(1100)]
    letters = [notice for notice in job.notices if notice.kind == "shard"]
    assert 32 < letters[-1].letter < 32 + 1100 / 8  # of all kinds: some tell of a busy machine
    assert all(len(n.message) <= 400 and len(n.data["shards"]) <= 6 for n in letters)


NAMES = """
for step, name in enumerate(["a/b.tar", 7, "https://me:pw@host/x.tar?token=abc", "y" * 300 + ".tar",
                             None, "", True, 1.5, object()]):
    supervise_probe.shard(name)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
finish_tape()
"""


def test_names_are_plain_short_and_free_of_secrets(probed):
    """The end of a long one is kept; what is no name is none."""
    job = probed.run(SETUP + NAMES)
    names = [each["shard"] for batch in job.output[0]["tape"] for each in batch.get("shards", ())]
    assert names == ["a/b.tar", "shard 7", "https://host/x.tar", "…" + "y" * 195 + ".tar"]
    assert job.column("batch_shard") == [0.0, 1.0, 2.0, 3.0] + [None] * 5


@pytest.mark.parametrize(
    ("is_web", "shifts"),
    [
        (lambda block, place: place % 4 > 0, [0.0, 0.0, 0.0]),
        (lambda block, place: place % 4 > 0 if block < 5 else place % 2, [0.0, 100.0, 100.0]),
        (lambda block, place: place % 4 > 0 if block < 5 else place % 3 > 0, [0.0, 0.0, 0.0]),
        (lambda block, place: place % 2 or block > 4, [0.0, 100.0, 100.0]),
        (lambda block, place: block < 3, []),
        (lambda block, place: True, []),
    ],
    ids=["same", "a-quarter-becomes-half", "chance", "a-source-ends", "in-turns", "one-source"],
)
def test_a_source_shift_is_how_far_a_share_is_from_its_first_blocks(is_web, shifts):
    mix = SourceMix()
    found = [
        mix.add([f"web/{number}.tar" if is_web(*divmod(number, 64)) else f"part-{number % 9}"])
        for number in range(64 * 7)
    ]
    assert [shift for shift in found if shift is not None] == shifts
    assert sum(mix.shares.values()) == pytest.approx(1.0)


def test_a_mix_that_stays_is_usual_in_the_end_and_then_the_old_one_is_news():
    mix = SourceMix()
    rows = [[f"{'ab'[n % 4 > 0 if 4 <= n // 64 < 17 else n % 4 == 0]}{n}"] for n in range(64 * 23)]
    found = [shift for row in rows if (shift := mix.add(row)) is not None]

    assert found == [*[200.0] * 8, 0.0, 0.0, *[200.0] * 6]


def test_batch_source_shift_is_that_of_what_the_job_reports(probed):
    script = """
for step in range(64 * 5):
    web = step % 4 > 0 if step // 64 > 3 else step % 4 == 0
    supervise_probe.shard(f"web/{step}.tar" if web else f"s3://user@code/part-{step % 9}")
    model(torch.ones(1, 2)).mean().backward()
    optimizer.step()
finish(model)
"""
    job = probed.run(SETUP + script)

    assert job.frames[-1]["step"] == 319 and job.frames[-1]["batch_source_shift"] == 200.0
    assert job.segment().status()["sources"] == {"web/#.tar": 0.75, "s#://code/part-#": 0.25}
