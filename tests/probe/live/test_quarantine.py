"""What is in quarantine is not trained on, whoever loads it, from the launch or a word on."""

import pytest

from supervise.store import Quarantine

# Each sample is (number of its shard, place in it), so the script knows what it trained on.
SETUP = """
import sys
import supervise_probe
from torch.utils.data import DataLoader, Dataset, IterableDataset

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
seen = []

def named(number):
    return f"data/{int(number)}.tar"

def sample(index):
    return torch.tensor([index // 4, index % 4], dtype=torch.float32)

def train(x):
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
    seen.append([x.tolist(), bool((model.weight != before).any())])

class Rows(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        x = sample(index)
        return {"x": x, "shard": named(x[0])}

class Web(IterableDataset):
    # As webdataset: a pipeline of stages, the first of which has the list.
    class Stage:
        def __init__(self):
            self.urls = [named(n) for n in range(6)]

    def __init__(self):
        self.pipeline = [Web.Stage()]

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        urls = self.pipeline[0].urls[info.id :: info.num_workers] if info else self.pipeline[0].urls
        for url in urls:
            number = int(url[5:-4])
            for place in range(4):
                yield {"x": sample(4 * number + place), "__url__": url}

class Stream(IterableDataset):
    # As a StreamingDataset: streams that are objects, and no shard in the batch.
    class One:
        def __init__(self, number):
            self.remote = named(number)

    def __init__(self):
        self.streams = [Stream.One(n) for n in range(6)]

    def __iter__(self):
        for stream in self.streams:
            number = int(stream.remote[5:-4])
            for place in range(4):
                yield sample(4 * number + place)

def end():
    emit(seen=seen)
    finish(model)
"""

KEYS = """
for batch in DataLoader(Rows(), batch_size=2, num_workers=WORKERS):
    train(batch["x"])
end()
"""
WAYS = {
    "batches-of-a-loader": KEYS.replace("WORKERS", "0"),
    "a-list-of-urls-of-workers": """
for batch in DataLoader(Web(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
    train(batch["x"])
end()
""",
    "streams": "for x in DataLoader(Stream(), batch_size=2):\n    train(x)\nend()\n",
}


@pytest.fixture
def held(tmp_path):
    """Write a manifest with these shards and batches; returns it."""
    manifest = Quarantine(tmp_path / "quarantine.json")

    def hold(*shards, batches=(), key="k", live=True, attempt=0):
        entries = [{"kind": "shard", "name": name} for name in shards]
        entries += [{"kind": "batch", "name": str(int(each))} for each in batches]
        manifest.change({"add": entries, "attempt": attempt}, key=key, live=live)
        return manifest

    hold.path, hold.manifest = str(manifest.path), manifest
    return hold


def shards_of(job):
    """The shards that each step was trained on, sorted."""
    return sorted({int(row[0]) for rows, _ in job.output[0]["seen"] for row in rows})


@pytest.mark.parametrize("way", WAYS)
def test_a_shard_in_quarantine_is_not_trained_on(probed, held, way):
    """From the launch on; the others come once each, as ever."""
    held("data/1.tar", "data/4.tar")
    job = probed.run(SETUP + WAYS[way], quarantine=held.path)

    assert shards_of(job) == [0, 2, 3, 5]
    assert len(job.output[0]["seen"]) == len(job.frames) == 8
    told = [notice for notice in job.notices if notice.kind == "quarantine"]
    assert "data/1.tar, data/4.tar" in told[0].message
    status = job.segment().status()["quarantine"]
    assert (status["generation"], status["shards"]) == (1, 2)
    if "batches" in way:
        assert status["passed_over"] == 4 and told[-1].data["passed_over"] >= 1


@pytest.mark.parametrize("way", ["batches-of-a-loader", "a-list-of-urls-of-workers"])
def test_without_an_entry_nothing_changes(probed, bare, held, way):
    """Bit-identical to a run that nobody watches."""
    nobody = bare.run(SETUP + WAYS[way]).output
    held("data/77.tar").change({"release": ["data/77.tar"]}, key="k2", live=True)
    assert probed.run(SETUP + WAYS[way], quarantine=held.path).output == nobody


@pytest.mark.parametrize("way", ["batches-of-a-loader", "streams"])
def test_a_quarantine_of_everything_empties_nothing(probed, held, way):
    held(*(f"data/{n}.tar" for n in range(6)))
    job = probed.run(SETUP + WAYS[way], quarantine=held.path)

    assert job.frames
    if way == "streams":
        assert shards_of(job) == [0, 1, 2, 3, 4, 5]
    said = [notice.message for notice in job.notices if notice.kind == "quarantine"]
    assert any("nothing is removed" in each or "nothing of it is passed" in each for each in said)


WORD = """
for epoch in range(2):
    for batch in DataLoader(Rows(), batch_size=2):
        if len(seen) == 2:
            barrier("go")
        if len(seen) == 12:
            barrier("again")
        train(batch["x"])
end()
"""


def test_a_word_puts_a_shard_in_and_lets_it_out_again(probed, held):
    job = probed.start(SETUP + WORD, quarantine=held.path)
    job.reached()
    held("data/1.tar")
    key = job.send("quarantine", generation=1, path=held.path)
    late = job.send("quarantine", generation=9, path=held.path)
    job.go()
    assert job.answer(key).result == {"held": 1, "shards": 1, "batches": 0}
    assert "generation 9 of the quarantine is not to be had" in job.answer(late).error
    job.reached("again")
    held.manifest.change({"release": ["data/1.tar"]}, key="k2", live=True)
    key = job.send("quarantine", generation=2, path=held.path)
    job.go("again")
    assert job.answer(key).ok
    probed.wait(job)
    numbers = [int(rows[0][0]) for rows, _ in job.output[0]["seen"]]

    assert numbers[:11] == [0, 0, 1, 2, 2, 3, 3, 4, 4, 5, 5]  # one was fetched before the word
    assert numbers[11:] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


BATCHES = """
for epoch in range(2):
    for x in DataLoader([sample(i) for i in range(24)], batch_size=4):
        train(x)
end()
"""


def test_a_batch_that_comes_again_has_its_update_dropped(probed, held):
    """By the fingerprint of its frame: the weights stay, the loop and its data go on."""
    first = probed.run(SETUP + BATCHES)
    held(batches=[first.frames[step]["batch_fingerprint"] for step in (1, 2)])
    job = probed.run(SETUP + BATCHES, quarantine=held.path)

    applied = [changed for _, changed in job.output[0]["seen"]]
    assert applied == [True, False, False, True, True, True] * 2
    assert [rows for rows, _ in job.output[0]["seen"]] == [r for r, _ in first.output[0]["seen"]]
    assert job.column("update_skipped") == [0.0 if each else 1.0 for each in applied]
    (told,) = [notice for notice in job.notices if "passed over so far" in notice.message]
    assert told.step == 1 and told.data["updates_dropped"] == 1


def test_on_a_device_a_batch_cannot_be_named_in_time(probed, held):
    """Refused, with the reason: its hash comes a step late."""
    job = probed.start(SETUP + WORD, quarantine=held.path, late=True)
    job.reached()
    held(batches=[17])
    key = job.send("quarantine", generation=1, path=held.path)
    job.go()
    ack = job.answer(key)
    job.reached("again")
    job.go("again")
    probed.wait(job)

    assert "hashed on the accelerator" in ack.error


PASSES = """
loader = DataLoader(Stream(), batch_size=2)
for epoch in range(2):
    for x in loader:
        if len(seen) == 2:
            barrier("go")
        train(x)
end()
"""


def test_an_entry_waits_for_its_launch_or_for_a_fence(probed, held):
    """With several ranks: the attempt it counts from decides, in every process alike. Where a
    dataset has a list, all ranks may take it up together, for their next pass."""
    held("data/1.tar", live=False, attempt=3)
    early = probed.start(SETUP + PASSES, quarantine=held.path, attempt=3)
    early.reached()
    key = early.send("quarantine_now", generation=1, path=held.path)
    early.go()
    assert early.answer(key).result["way"] == "lists"
    probed.wait(early)
    numbers = [int(rows[0][0]) for rows, _ in early.output[0]["seen"]]
    later = probed.run(SETUP + KEYS.replace("WORKERS", "2"), quarantine=held.path, attempt=4)

    assert numbers == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 0, 0, 2, 2, 3, 3, 4, 4, 5, 5]
    assert shards_of(later) == [0, 2, 3, 4, 5]


def test_one_of_several_ranks_passes_over_no_batch(probed, held):
    """The others would wait for it at the end of the epoch; a list is filtered all the same."""
    held("data/1.tar")
    ranks = {"RANK": "0", "WORLD_SIZE": "2"}
    job = probed.run(SETUP + WAYS["batches-of-a-loader"], environ=ranks, quarantine=held.path)
    lists = probed.run(SETUP + WAYS["streams"], environ=ranks, quarantine=held.path)

    assert shards_of(job) == [0, 1, 2, 3, 4, 5] and shards_of(lists) == [0, 2, 3, 4, 5]
    assert any("of 2 ranks none may pass over" in notice.message for notice in job.notices)


INDEXED = """
class Indexed(Stream):
    def __getitem__(self, index):
        return sample(index)

for x in DataLoader(Indexed(), batch_size=2):
    train(x)
end()
"""


def test_a_dataset_that_is_read_by_index_is_left_alone(probed, held):
    """One shard out would move all that lie behind it."""
    held("data/1.tar")
    job = probed.run(SETUP + INDEXED, quarantine=held.path)

    assert shards_of(job) == [0, 1, 2, 3, 4, 5]
    assert any("is read by index" in notice.message for notice in job.notices)


ASKED = """
import os

def asked(count):
    return [n for n in range(count) if supervise_probe.is_quarantined(named(n))]

def write(text):
    with open(os.environ["MANIFEST"] + "~", "w") as file:
        file.write(text)
    os.replace(os.environ["MANIFEST"] + "~", os.environ["MANIFEST"])

first = asked(3)
train(sample(0))
write('{"entries": [{"kind": "shard", "name": "data/1.tar"}]}')
held = [asked(3)]
train(sample(0))
for text in ('{"entries": [{}]}', '{"entries": [{}] }', '{"entries": []}'):
    write(text)
    held.append(asked(3))
    train(sample(0))
asked(200)
for _ in range(20):
    train(sample(0))
emit(first=first, held=held)
finish(model)
"""


def test_what_a_person_writes_meanwhile_is_obeyed_and_told(probed, tmp_path):
    """The shortest form, by a job that only asks; what cannot be read is told once."""
    path = str(tmp_path / "quarantine.json")
    job = probed.run(SETUP + ASKED, environ={"MANIFEST": path}, quarantine=path)

    assert job.output[0] == {"first": [], "held": [[1], [1], [1], []]}
    told = [(each.step, each.message) for each in job.notices if each.kind == "quarantine"]
    assert told == [
        (0, "in quarantine, by hand: data/1.tar"),  # the first step ends where the next begins
        (2, "the quarantine cannot be read: KeyError: 'kind'"),
        (4, "in quarantine, by hand: nothing"),
    ]
    assert "quarantine" not in job.segment().status()
