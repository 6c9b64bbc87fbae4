"""Shares of a step's time and of a device's peak, against the job's own clock and count."""

import pytest

COLLECTIVES = """
import torch.distributed as dist

def group(rank):
    store = dist.FileStore("store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)

x = torch.zeros(4)
if os.fork() == 0:  # the other rank, which is late each time
    group(1)
    for _ in range(5):
        time.sleep(0.03)
        dist.all_reduce(x)
    dist.barrier()
    os._exit(0)
group(0)
spent = []

def timed(function, *args):
    began = time.monotonic()
    result = function(*args)
    spent.append(time.monotonic() - began)
    return result

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)
        self.at = None

    def forward(self, x):
        if self.at == "forward":
            timed(dist.all_reduce, torch.zeros(4))
        return self.inner(x)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def closure():
    if model.at == "closure":
        model.at = "forward"
    loss = model(torch.ones(2, 4)).sum()
    optimizer.zero_grad()
    loss.backward()
    return loss

for at in (None, None, "loop", "forward", "work", "backward", "closure", None):
    spent, model.at = [], at
    if at == "closure":
        optimizer.step(closure)
    else:
        loss = model(torch.ones(2, 4)).sum()
        if at == "loop":
            timed(dist.all_reduce, torch.zeros(4))
        if at == "work":
            work = timed(dist.all_reduce, torch.zeros(4), dist.ReduceOp.SUM, None, True)
            timed(work.wait)
        if at == "backward":
            loss.register_hook(lambda grad: timed(dist.all_reduce, torch.zeros(4)))
        loss.backward()
        optimizer.step()
    emit(spent=sum(spent))
timed(dist.barrier)
dist.destroy_process_group()
"""

PARTS = ("input_time", "forward_time", "backward_time", "optimizer_time", "comm_time", "other_time")


def test_waiting_for_other_ranks_is_a_part_of_its_own(probed):
    """Wherever the job waits, it is counted once, and not as forward, backward or optimizer."""
    job = probed.run(COLLECTIVES)
    spent = [row["spent"] for row in job.output]

    assert min(spent[3:7]) > 0.02  # the other rank sleeps 30 ms each time, the first ahead of us
    assert job.column("comm_time")[:2] == [None, None]
    for step, frame in enumerate(job.frames):
        if step < 2:
            continue
        assert 0.6 * spent[step] <= frame["comm_time"] <= spent[step] + 1e-6, step
        known = sum(frame.get(part, 0.0) for part in PARTS)
        assert known == pytest.approx(frame["step_time"], rel=1e-9)
        assert frame["comm_time_frac"] == pytest.approx(
            100 * frame["comm_time"] / frame["step_time"], rel=1e-12
        )
        for part in ("forward_time", "backward_time", "optimizer_time"):
            assert 0 <= frame[part] < 0.02, (step, part)


FULL_GRAPH = """
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
graphs = []

def backend(graph, example):
    graphs.append(graph)
    return graph.forward

@torch.compile(backend=backend, fullgraph=True)
def work(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(work(torch.ones(2, 4))).sum().backward()
    optimizer.step()
emit(graphs=len(graphs))
dist.destroy_process_group()
"""


@pytest.mark.filterwarnings("ignore")
def test_a_collective_in_a_compiled_graph_stays_in_it(probed):
    """torch.compile tells collectives by identity; ours must be those that it knows."""
    job = probed.run(FULL_GRAPH)

    assert job.output == [{"graphs": 1}]
    assert len(job.frames) == 4


LOADER = """
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        time.sleep(0.004)
        return torch.full((4,), float(i))

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(Slow(), batch_size=2):
    model(batch).sum().backward()
    optimizer.step()
"""


def test_waiting_for_data_is_told_as_a_share(probed):
    """And what a job without a device or other ranks cannot have is absent."""
    job = probed.run(LOADER)

    for frame in job.frames[1:]:
        assert frame["input_time"] > 0.008
        assert frame["dataloader_stall_frac"] == pytest.approx(
            100 * frame["input_time"] / frame["step_time"], rel=1e-12
        )
    device = "gpu_mem_allocated gpu_mem_reserved gpu_alloc_retries mfu"
    for name in f"comm_time comm_time_frac {device}".split():
        assert job.column(name) == [None] * 3, name
    assert job.segment().status()["mfu"].startswith("no: the peak of cpu is not in the table")


FUNCTION = """
from torch.utils.data import DataLoader

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    if step == 2:
        with torch.no_grad():
            for batch in DataLoader(torch.randn(8, 4)):
                model(batch)
    time.sleep(0.004)  # as where batches are waited for
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
"""


def test_where_only_an_evaluation_has_a_loader_nothing_is_told_of_it(probed):
    """A share of 0 would say that the loop never waits for its data; it is in the other time."""
    job = probed.run(FUNCTION)

    for name in ("input_time", "dataloader_stall_frac"):
        assert job.column(name) == [None] * 6, name
    assert all(frame["other_time"] > 0.004 for frame in job.frames[1:])


MODEL = """
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

layer = nn.TransformerEncoderLayer(24, 3, 32, dropout=0.0, batch_first=True)
blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
model = nn.Sequential(nn.Embedding(40, 24), blocks, nn.Linear(24, 40, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for lengths in ((8, 8), (8, 20), (5,), (20, 8)):
    for length in lengths:
        ids = torch.randint(40, (2, length))
        targets = ids.clone()
        targets[:, :3] = -100
        F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
    optimizer.step()
for length in (5, 8, 20):
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(2, length, dtype=torch.int64)).sum().backward()
    emit(length=length, flops=counter.get_total_flops())
"""


def test_utilisation_is_what_a_counter_of_operations_finds(probed):
    """Of every micro-batch and its own length; tokens without a target are worked for too."""
    job = probed.run(MODEL, peak_flops=1e11)
    flops = {row["length"]: row["flops"] for row in job.output}
    steps = [2 * flops[8], flops[8] + flops[20], flops[5], flops[20] + flops[8]]

    assert job.column("mfu")[0] is None  # the first step has no time
    for frame, needed in zip(job.frames[1:], steps[1:], strict=True):
        assert frame["mfu"] == pytest.approx(100 * needed / frame["step_time"] / 1e11, rel=1e-9)
    told = job.segment().status()["mfu"]
    assert told.endswith("MFLOP a token, 2 attention layers; peak 0.1 TFLOP/s")
