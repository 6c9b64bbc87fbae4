"""Which batches are told apart: however the model is given them, and of whatever type they are."""

import pytest

TYPES = (  # none beside one whose zeros and ones are the same bytes
    *("float64", "bool", "bfloat16", "uint8", "float16", "int8", "float8_e5m2", "int16"),
)

GIVEN = """
import dataclasses
from collections import UserDict, namedtuple

@dataclasses.dataclass
class Whole:
    name: str
    x: torch.Tensor

@dataclasses.dataclass(frozen=True)
class Slots:
    __slots__ = ("name", "x")
    name: str
    x: torch.Tensor

Pair = namedtuple("Pair", "name x")
WAYS = dict(
    tensor=lambda x: x,
    dict=lambda x: dict(ones=torch.ones(4, 6), id=7, x=x),
    user_dict=lambda x: UserDict(id=7, x=x),
    dataclass=lambda x: Whole("a", x),
    slots=lambda x: Slots("a", x),
    tuple=lambda x: ("a", x),
    named=lambda x: Pair("a", x),
    list=lambda x: [[], None, x],
    deep=lambda x: [dict(a=7, b=Whole("a", x))],
)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, given):
        return self.head(self.table(ids))

torch.manual_seed(1)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [torch.randint(0, 50, (4, 6)) for _ in range(3)]
ids = batches[0]
model(ids).sum().backward()
optimizer.step()  # the outermost module is known from here on
for name, give in WAYS.items():
    for ids in batches:
        model(give(ids)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("late", [False, True])
def test_a_batch_has_one_fingerprint_however_it_is_given(probed, late):
    """In dicts, mappings, sequences and dataclasses, one in another, before tensors of floats."""
    job = probed.run(GIVEN, late=late)
    found = job.column("batch_fingerprint")[1:]
    assert len(found) == 27 and len(set(found[:3])) == 3 and None not in found
    assert found == found[:3] * 9
    # A list may hold one tensor for each sample; there nothing is counted.
    assert job.column("tokens_per_update")[1:] == [24] * 21 + [None] * 6


OF_A_TYPE = """
model = nn.Linear(64, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

class Casts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model

    def forward(self, x):
        return self.inner(x.float())

outer = Casts()
outer(torch.ones(2, 64)).sum().backward()
optimizer.step()  # the outermost module is known from here on
for name in {types}:
    for number in (0, 1, 2, 0):
        torch.manual_seed(number)
        x = torch.randint(0, 2, (16, 64)).to(getattr(torch, name))
        outer(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_all_real_types_are_told_apart(probed):
    job = probed.run(OF_A_TYPE.format(types=TYPES), late=True)
    found = job.column("batch_fingerprint")[1:]
    assert len(found) == 4 * len(TYPES)
    for index, name in enumerate(TYPES):
        four = found[4 * index : 4 * index + 4]
        assert None not in four and four[0] == four[3] and len(set(four)) == 3, name
    assert job.column("tokens_per_update") == [None] * (1 + len(found))


STAYS = """
class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(50, 8), nn.Linear(12, 3)

    def forward(self, x, ids, offsets):
        return self.head(torch.cat([x, self.table(ids[0], offsets)], 1))

torch.manual_seed(1)
model = Bag()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [(torch.rand(4, 4), [torch.randint(0, 50, (8,))]) for _ in range(6)]
batches += [batches[-1]] * 3
for x, ids in batches:
    model(x, ids, torch.arange(0, 8, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_batches_are_told_apart_where_the_first_input_stays(probed):
    """As the offsets of bags do, and the edges of a graph whose nodes change."""
    column = probed.run(STAYS).column("batch_fingerprint")[3:]
    assert len(set(column[:3])) == 3 and len(set(column[2:])) == 1


def test_all_of_the_data_in_each_step_have_one_fingerprint_from_the_first_on(probed):
    """So a job of full batches is not taken for a loader that began to give one again and again."""
    script = STAYS.replace("batches += [batches[-1]] * 3", "batches = [batches[0]] * 9")
    column = probed.run(script).column("batch_fingerprint")
    assert len(column) == 9 and len(set(column[1:])) == 1


FIRST = """
model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(48, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
outer = {wrap}
batches = [dict(mask=torch.ones(4, 6).long(), ids=torch.randint(0, 50, (4, 6))) for _ in range(3)]

def steps(given):
    for batch in given:
        {zero}
        outer(batch["ids"]).sum().backward()
        optimizer.step()

steps({given})
steps(batches)
emit(breaks=len(torch._dynamo.utils.counters["graph_break"]) if "_dynamo" in vars(torch) else 0)
"""
LOADER = "torch.utils.data.DataLoader(batches, batch_size=None)"
ZERO = "optimizer.zero_grad()"
COMPILED = f"[{ZERO}, torch.compile(model, backend='eager')][1]"


@pytest.mark.parametrize(
    ("wrap", "given", "zero", "late"),
    [
        ("model", LOADER, "pass", False),
        ("model", "batches", ZERO, True),
        (COMPILED, "batches", ZERO, False),
    ],
)
def test_the_first_batch_of_a_process_has_the_fingerprint_that_it_has_later(
    probed, wrap, given, zero, late
):
    """A loader or `zero_grad` shows that the model is about to be called for the first time."""
    job = probed.run(FIRST.format(wrap=wrap, given=given, zero=zero), late=late)
    found = job.column("batch_fingerprint")
    assert len(set(found)) == 3 and found[:3] == found[3:]
    assert job.output == [{"breaks": 0}]


PADDED = """
model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1)
batches = [torch.zeros(8, 192, dtype=torch.int64) for _ in range(12)]
for ids in batches:
    ids[:, :8], ids[:, 8:32] = 7, torch.randint(1, 50, (8, 24))
for ids in [*batches, *[batches[-1]] * 3]:
    model(ids).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_batches_are_told_apart_where_rows_are_mostly_padding(probed):
    """As prompts with one beginning that are filled up to the longest length of the model."""
    column = probed.run(PADDED).column("batch_fingerprint")[3:]
    assert len(set(column[:9])) == 9 and len(set(column[8:])) == 1


NO_MEMORY = """
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.head = nn.Linear(64, 2)

    def forward(self, x):
        return self.head(self.frozen(getattr(x, "a", x)).relu())

def train(make, loss, free=False):
    model = Model()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    for _ in range(4):
        x = make()
        optimizer.zero_grad()
        value = loss(model(x))
        if free:
            x.untyped_storage().resize_(0)
        value.backward()
        optimizer.step()
    return model

def jagged():
    rows = [torch.randn(n, 64) for n in (3, 5, 70)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)

def mean(y):
    return y.pow(2).mean()

models = [
    train(jagged, lambda y: mean(y.values())),
    train(lambda: TwoTensor(torch.randn(32, 64), torch.randn(32, 64)), mean),
    train(lambda: torch.randn(32, 64), mean, free=True),
]
with FakeTensorMode():
    train(lambda: torch.randn(32, 64), mean)
models.append(train(lambda: torch.randn(32, 64), mean))
finish(*models)
"""


def test_inputs_without_memory_of_their_own_have_no_fingerprint(probed, bare):
    """Of jagged and fake tensors, subclasses that dispatch, and storage that was freed."""
    job, straight = probed.run(NO_MEMORY), bare.run(NO_MEMORY)
    assert job.output == straight.output and job.err == straight.err
    found = job.column("batch_fingerprint")
    assert found[:12] == [None] * 12 and None not in found[-3:]


def test_memory_is_readable_where_the_storage_covers_all_values():
    import torch
    from torch.testing._internal.two_tensor import TwoTensor

    from supervise_probe.torch_state import is_readable

    class Labelled(torch.Tensor):
        """It has memory of its own, as images of torchvision."""

    x = torch.randn(8, 6)
    freed, cut = torch.randn(8, 6), torch.randn(8, 6)
    parts = freed[2:], cut[4:, 1:]
    freed.untyped_storage().resize_(0)
    cut.untyped_storage().resize_(8 * 6 * 4 - 1)
    for tensor in (x, x.t()[1:3], x[7:], x[:, ::2], torch.nn.Parameter(x), x.as_subclass(Labelled)):
        assert is_readable(torch, tensor)
    absent = [*parts, freed, cut, x.to("meta"), x.to_sparse(), TwoTensor(x, x)]
    for tensor in (*absent, torch._efficientzerotensor((3,)), torch.empty(0, 3)):
        assert not is_readable(torch, tensor)
    assert is_readable(torch, cut[:7])
