"""Which weights make queries and keys, and the copies of them that leave the job."""

import json
import math

import pytest

from supervise.core.model import LateFrame, Mechanisms
from supervise.runtime import MechanismMonitor

from ...support.waiting import wait_until

torch = pytest.importorskip("torch")

FIND = """
from supervise_probe.sampling.weight_pairs import NotFoundError, find_origin

class Fused(nn.Module):
    def __init__(self, by_head):
        super().__init__()
        self.by_head, self.qkv = by_head, nn.Linear(32, 96)

    def forward(self, x):
        y = self.qkv(x)
        if self.by_head:
            return attend(*y.unflatten(-1, (4, 24)).transpose(1, 2).chunk(3, -1))
        return attend(*y.unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0))

class Grouped(nn.Module):
    def __init__(self, repeat=False):
        super().__init__()
        self.repeat = repeat
        self.q, self.kv = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.qn, self.kn = nn.RMSNorm(8), nn.LayerNorm(8)

    def turn(self, z):
        angle = torch.randn(z.shape[-2], 4)
        c, s = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        return z * c + torch.cat([-z[..., 4:], z[..., :4]], -1) * s

    def forward(self, x):
        B, T, _ = x.shape
        q = self.turn(self.qn(self.q(x).view(B, T, 4, 8)).transpose(1, 2))
        k, v = self.kv(x).view(B, T, 2, 2, 8).unbind(2)
        k, v = self.turn(self.kn(k).transpose(1, 2)), v.transpose(1, 2)
        if self.repeat:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return attend(q, k, v, enable_gqa=not self.repeat)

class Stored(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(32, 96)), nn.Parameter(torch.zeros(96))

    def forward(self, x):
        y = torch.addmm(self.bias, x.view(-1, 32), self.weight).view(*x.shape[:2], 96)
        return attend(*(z.unflatten(-1, (4, 8)).transpose(1, 2) for z in y.chunk(3, -1)))

class Latent(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.down = nn.Linear(32, 32), nn.Linear(32, 6)
        self.up = nn.Linear(6, 64)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = self.up(self.down(x)).unflatten(-1, (4, 16)).transpose(1, 2).split(8, -1)
        return attend(q, k, v)

class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 2), nn.Linear(2, 32)

    def forward(self, x):
        q = (self.q(x) + self.b(self.a(x))).unflatten(-1, (4, 8)).transpose(1, 2)
        return attend(q, q, q)

class Layer(nn.TransformerEncoderLayer):
    def forward(self, x):
        return super().forward(x, src_mask=torch.zeros(x.shape[1], x.shape[1]), is_causal=False)

inner = F.scaled_dot_product_attention

def attend(q, k, v, **options):
    return look(q, k, v, **options)

def look(q, k, v, *args, **options):
    for tensor in (q, k):
        try:
            origin = find_origin(torch, tensor)
        except NotFoundError as problem:
            rows.append(str(problem))
            continue
        # The proof: only these rows make this head.
        for head, members in enumerate(origin.rows):
            picked = tensor[:, head * tensor.shape[1] // len(origin.rows)].square().sum()
            grad, = torch.autograd.grad(picked, origin.weight, retain_graph=True)
            grad = grad.T if origin.is_transposed else grad
            assert grad.abs().sum(1).nonzero().flatten().tolist() == members
        name = next(n for n, p in model.named_parameters() if p is origin.weight)
        rows.append([name, len(origin.rows)])
    return inner(q, k, v, *args, **options)

F.scaled_dot_product_attention = look
kinds = {
    "permuted": Fused(False), "by head": Fused(True),
    "grouped": Grouped(), "repeated": Grouped(repeat=True),
    "stored": Stored(), "latent": Latent(), "adapted": Adapted(),
    "in_proj": Layer(32, 4, batch_first=True, dropout=0.0),
}
for kind, model in kinds.items():
    rows = []
    model(torch.randn(2, 6, 32))
    emit(kind=kind, rows=rows)
rows, model = [], kinds["grouped"]
with torch.autocast("cpu", torch.bfloat16):
    model.qn = model.kn = nn.Identity()
    model(torch.randn(2, 6, 32))
emit(kind="autocast", rows=rows)
"""


def test_weights_are_found_without_names(probed):
    """Each head by its own rows, which are those that have a gradient of it."""
    job = probed.run(FIND)
    found = {row["kind"]: row["rows"] for row in job.output}
    for kind in ("permuted", "by head"):
        assert found[kind] == [["qkv.weight", 4]] * 2
    for kind in ("grouped", "repeated", "autocast"):
        assert found[kind] == [["q.weight", 4], ["kv.weight", 2]], kind
    assert found["stored"] == [["weight", 4]] * 2
    assert found["latent"] == [["q.weight", 4], ["up.weight", 4]]
    assert found["in_proj"] == [["self_attn.in_proj_weight", 4]] * 2
    assert found["adapted"] == ["it is made of 2 matrix products"] * 2


TRAIN = """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts, self.top_k = 5, 2
        self.gate = nn.Linear(16, 5, bias=False)
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(5)])

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.stack([e(x) for e in self.experts], -2)
        picked = out.gather(-2, chosen[..., None].expand(*chosen.shape, 16))
        return (weight[..., None] * picked).sum(-2)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), Experts()

    def forward(self, x):
        q, k, v = (z.unflatten(-1, (2, 8)).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

model = nn.Sequential(*(Block() for _ in range(3)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(45):
    optimizer.zero_grad()
    model(torch.randn(4, 10, 16)).square().mean().backward()
    optimizer.step()
    if (step + 1) % 10 in (0, 4):
        emit(step=step, weights=[block.qkv.weight.tolist() for block in model],
             routers=[block.out.gate.weight.tolist() for block in model])
    if step == 44:
        barrier("go")
finish(model)
"""
SMALL = "import _supervise_probe.sampling.weight_pairs as pairs\npairs.MOST_BYTES = 20_000\n"
SAMPLING = {"attention": 3, "activations": 0, "routing": 0, "weights": 0, "share": 100}


def with_pair(probed, script):
    """Start a job that keeps a pair of weights; return it at its barrier, and the pair's file."""
    # A look for weights takes a small share of the time: of a job this short, all that it needs.
    pairs = {"every": 10, "distance": 4, "share": 100.0}
    job = probed.start(script, sampling=SAMPLING, mechanisms=pairs)
    job.reached()
    path = job.folder / "shm" / "weight-pair"
    wait_until(path.exists, "a pair")
    return job, path


def head_of(path):
    with path.open("rb") as file:
        return json.loads(file.readline())


def rank(matrix):
    p = torch.linalg.svdvals(matrix) ** 2
    p = p / p.sum()
    return math.exp(-float((p * p.log()).sum()))


def test_a_pair_leaves_the_job_and_comes_back_as_a_late_frame(probed, bare):
    """Of its own step, from the weights of that step and of some before; the job is the same."""
    job, path = with_pair(probed, TRAIN)
    head = head_of(path)
    rows = {row["layer"]: row for row in head["matrices"] if row["role"] == "query"}
    monitor = MechanismMonitor(Mechanisms(share=1.0), path.parent)
    events = []
    wait_until(lambda: events.extend(monitor.poll(1)) or events, "an answer", every_s=0.02)
    assert path.exists(), "it is not asked for another one before it may be"
    list(monitor.poll(10**18))
    assert not path.exists()
    monitor.close()
    status = job.segment().status()
    job.go()
    probed.wait(job)

    (frame,) = events
    assert isinstance(frame, LateFrame), frame
    assert (frame.stream, frame.step, head["steps"]) == ("savepoint", head["step"], 4)
    assert sorted(rows) == [0, 1, 2] and rows[0]["heads"] == 2
    assert {"dw_spectral_entropy", "qk_d2_spectral_entropy.2", "singular_entropy"} <= {
        *frame.values
    }
    told = {row["step"]: row["weights"] for row in job.output if "step" in row}
    after, before = (torch.tensor(told[step][0]).double() for step in (frame.step, frame.step - 4))
    ranks = [rank(part) for part in (after - before).chunk(3)[:2]]
    assert frame.values["dw_spectral_entropy.0"] == pytest.approx(sum(ranks) / 2, rel=1e-3)
    assert job.output[-1]["sha"] == bare.run(TRAIN.replace("barrier", "str")).output[-1]["sha"]
    routers = next(row["routers"] for row in job.output if row.get("step") == frame.step)
    rows = torch.tensor(routers[1]).double()
    condition = (rows - rows.mean(0)).norm(dim=1).max() / rows.mean(0).norm()
    assert frame.values["router_conditioning_max.1"] == pytest.approx(float(condition), rel=1e-5)
    assert "3 layers, 3 routers, 8 other matrices, every" in status["sampling"]["spectra"]


def test_where_not_all_fits_whole_layers_are_left_out_and_no_router(probed):
    job, path = with_pair(probed, SMALL + TRAIN)
    roles = [row["role"] for row in head_of(path)["matrices"]]
    status = job.segment().status()
    job.go()
    probed.wait(job)

    assert roles == ["router"] * 3 + ["query", "key"]
    assert status["sampling"]["spectra"].startswith("1 layers, 3 routers, every")
