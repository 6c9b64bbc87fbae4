"""Tracers of torch see torch's own functions; compilers: tests/matrix/test_compiled.py."""

MODEL = """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

def step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(torch.randn(8, 8)), torch.randint(0, 4, (8,)))
    loss.backward()
    optimizer.step()
    return loss
"""

TRANSFORMED = """
import warnings
warnings.simplefilter("ignore")         # torch's own

@torch.jit.script
def scripted(x, y):
    return torch.nn.functional.cross_entropy(x, y)

step()
x, y = torch.randn(8, 8), torch.randint(0, 4, (8,))
assert scripted(model(x), y) == F.cross_entropy(model(x), y)
torch.jit.script(model)
assert "sum" not in str(torch.jit.trace(model, (x,)).graph)

def loss(weights, x, y):
    return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

weights = dict(model.named_parameters())
torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x[:, None], y[:, None])
from torch._subclasses.fake_tensor import FakeTensorMode

def updated(x):
    weight = nn.Parameter(torch.ones(3))
    mover = torch.optim.SGD([weight], lr=0.1)
    (weight * x).sum().backward()
    nn.utils.clip_grad_norm_([weight], 1.0)
    mover.step()
    return weight.detach() * x

graph = str(torch.jit.trace(updated, torch.ones(3), check_trace=False).graph)
emit(traced=graph.count("aten::"))
with FakeTensorMode():
    ghost = nn.Linear(4, 4)
    shadow = torch.optim.SGD(ghost.parameters(), lr=0.1)
    ghost(torch.ones(2, 4)).sum().backward()
    shadow.step()
step()
"""


def test_other_transformations_do_not_meet_the_probe(probed, bare):
    """TorchScript, tracing, functorch and fake tensors see torch's own functions."""
    script = MODEL + TRANSFORMED
    job = probed.run(script)
    assert job.output == bare.run(script).output, "a traced step holds operations of ours"
    assert job.err == "" and job.notices == []
    assert len(job.frames) == 2
    assert set(job.segment().status()["collectors"].values()) == {"on"}


PAIRED = """
from torch._subclasses.fake_tensor import FakeTensorMode

class Paired(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 1)

    def forward(self, x, y):
        return F.mse_loss(self.a(x), y)

class Odd:
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return "odd"

for _ in range(4):
    step()
x, y, paired = torch.randn(8, 4), torch.randn(8, 1), Paired()
emit(odd=F.mse_loss(Odd(), y), traced=len(torch.fx.symbolic_trace(paired).graph.nodes))
graph = torch.export.export(paired, (x, y), strict=False).graph
emit(exported=[str(node.target) for node in graph.nodes])
with FakeTensorMode(allow_non_fake_inputs=True) as fake:
    Paired()(x, y)
    Paired()(fake.from_tensor(x), fake.from_tensor(y))
step()
finish(model)
"""


def test_losses_of_pairs_are_asked_of_plain_tensors_only(probed, bare):
    """Also while one is waited for: proxies, fake tensors and others are torch's alone."""
    config = {"savepoints": {"every": 2, "keep": 2, "max_bytes": 1 << 24}, "probe_batch": {}}
    job = probed.run(MODEL + PAIRED, **config)
    assert job.output == bare.run(MODEL + PAIRED).output and job.err == ""
    assert job.output[0]["odd"] == "odd" and "off" not in job.marks
    assert set(job.segment().status()["collectors"].values()) == {"on"}
