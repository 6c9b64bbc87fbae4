"""Two rows once more through a compiled model's original or through a replica, and nothing of the
job is different.

All kinds of compiled models are trained one after the other in one process, since loading the
compiler takes seconds.
"""

import pytest

SAMPLING = {"attention": 3, "activations": 3, "routing": 0, "weights": 0, "share": 100}

TRAIN = """
import sys
import warnings
from torch._dynamo.utils import counters

warnings.filterwarnings("ignore", message="The .grad attribute")  # the compiler's own looks
SIZE = 12
probed = sys.modules.get("_supervise_probe")
graphs, seen, kinds = [], [], set()

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (2, 8)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (2, 8)).transpose(1, 2)
        keep(q, k)
        y = F.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.norm(y.transpose(1, 2)).transpose(1, 2))
        keep(x)
        return x

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(16, 40)
        self.calls, self.counts = 0, False

    def forward(self, tokens):
        if self.counts:
            self.count()
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    @torch.compiler.disable
    def count(self):
        self.calls += 1

def keep(*tensors):
    if not torch.compiler.is_compiling():
        seen.append([t.detach().double() for t in tensors])
        kinds.add(str(tensors[0].dtype))

def backend(graph, inputs):
    graphs.append(1)
    return graph.forward

def blocks(model):
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
    return model

def in_place(model):
    model.compile(backend=backend, fullgraph=True)
    return model

def counting(model):  # a forward that changes the model
    model.counts = True
    return torch.compile(model, backend=backend)

def train(number, prepare, exact=True, autocast=False):
    inner = Model()
    model = prepare(inner)
    graphs.clear(), counters.clear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    looked = 0
    for step in range(number, number + 20):  # it takes up to 8 to learn which optimizer ends one
        tokens = torch.randint(0, 40, (4, SIZE))
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            for micro in tokens.chunk(2) if step == 3 else [tokens]:
                logits = model(micro)
                F.cross_entropy(logits.float().flatten(0, 1), micro.flatten()).backward()
        seen.clear(), kinds.clear()
        optimizer.step()
        if probed and exact and seen:
            looked += 1
            look(step, autocast)
        assert not any(m._forward_hooks for m in model.modules())
    if probed:
        emit(last=step, looked=looked, refused=probed._probe.parts.sampler.refused)
    emit(graphs=len(graphs), breaks=sum(counters["graph_break"].values()),
         frames=dict(counters["frames"]), calls=inner.calls, chance=torch.rand(1).item())
    finish(inner)
    return step + 1

def look(step, autocast):
    assert len(seen) in (4, 12), len(seen)  # the first time there is a trial: twice
    del seen[:-4]
    assert ("torch.bfloat16" in kinds) == autocast, kinds
    (q0, k0), (x0,), (q1, k1), (x1,) = seen
    top = []
    for q, k in ((q0, k0), (q1, k1)):
        logits = q @ k.transpose(-2, -1) / math.sqrt(8)
        top.append(logits.masked_fill(~torch.ones(SIZE, SIZE).tril().bool(), -math.inf).max())
    emit(step=step, max_attn_logit=max(top).item(), rows=len(x0),
         residual_rms=max((x ** 2).mean().sqrt().item() for x in (x0, x1)))

number = 0
for prepare in in_place, blocks:
    number = train(number, prepare)
number = train(number, lambda m: torch.compile(m, backend=backend, fullgraph=True), autocast=True)
train(number, counting, exact=False)
"""


def plain(job):
    """What both tell: whatever is of the job itself."""
    return [row for row in job.output if "step" not in row and "refused" not in row]


def test_compiled_models_are_seen_and_not_disturbed_or_it_is_refused(probed, bare):
    job, alone = probed.run(TRAIN, sampling=SAMPLING), bare.run(TRAIN)
    assert job.err == ""
    assert plain(job) == plain(alone)
    assert len(plain(alone)) == 8
    assert any(row.get("calls") == 20 for row in plain(alone))

    done = [row for row in job.output if "refused" in row]
    assert all(not row["refused"] and row["looked"] >= 3 for row in done[:3])
    told = {row["step"]: row for row in job.output if "step" in row}
    for step, row in told.items():
        assert step % 3 == 0
        assert row["rows"] == 2
        for name in ("max_attn_logit", "residual_rms"):
            assert job.frames[step][name] == pytest.approx(row[name], rel=1e-5), step
        assert job.frames[step]["logz_mean"] > 0
    assert [row["refused"] for row in done[3:]] == ["a forward of the model changes Model.calls"]


# One of several ranks; torch's own double of a backend waits for nobody.
ONE_OF_SEVERAL = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

def functional():
    from torch.distributed import _functional_collectives as collectives
    collectives.wait_tensor(collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, ids):
        x = F.dropout(self.table(ids), 0.1)
        CALL
        return self.head(F.scaled_dot_product_attention(x, x, x))

inner = Model()
model = WRAP
optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
for step in range(24):
    ids = torch.randint(0, 9, (4, 6))
    with getattr(model, "no_sync", torch.enable_grad)():  # that backend reduces no gradients
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
emit(ended=True)
dist.destroy_process_group()
"""


DDP = "nn.parallel.DistributedDataParallel(inner)"
HALF = DDP.replace("inner", "inner, process_group=dist.new_group([0, 1])")


@pytest.mark.parametrize(
    ("call", "world", "wrap", "why"),
    [
        ("pass", 2, DDP, None),
        ("dist.all_reduce(torch.ones(2), async_op=True)", 2, DDP, "c10d::allreduce_"),
        ("dist.barrier()", 2, DDP, "c10d::barrier, which may wait"),
        ("functional()", 2, DDP, "_c10d_functional::all_reduce, which may wait"),
        ("pass", 2, "inner", "one of 2 ranks cannot run the model alone"),
        ("pass", 4, HALF, "one of 4 ranks cannot run the model alone"),
    ],
)
def test_a_replica_runs_alone_only_what_waits_for_no_other_rank(probed, call, world, wrap, why):
    """A rank that waited would hang the job; the job's own calls go on as ever. Only the module of
    one wrapper of all ranks is a replica."""
    script = ONE_OF_SEVERAL.replace("CALL", call).replace("WRAP", wrap)
    script = script.replace("world_size=2", f"world_size={world}")
    keep = {"every": 5, "keep": 4, "max_bytes": 1 << 24}
    job = probed.run(script, savepoints=keep, probe_batch={})
    assert job.output == [{"ended": True}]
    assert len(job.notices) == bool(why) and all(why in n.message for n in job.notices)
