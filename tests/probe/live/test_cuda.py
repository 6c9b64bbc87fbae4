"""On a CUDA device: the host never waits for it, and what it computes is what it always did.

Needs a device; without one the same paths are walked by the tests with `late=True`.
"""

import pytest

from tests.support.probed_job import PREAMBLE

STEPS, WARM = 26, 10  # by then both copies of the sampled weights are there, and kernels are loaded
SAMPLING = {
    "attention": 4,
    "activations": 4,
    "routers": 4,
    "weights": 4,
    "gradients": 4,
    "share": 1e6,
}
SAMPLED = {
    "max_attn_logit",
    "attn_entropy",
    "logz_mean",
    "router_weight_similarity",
    "opt_state_finite",
    "adam_rms_ratio",
    "layer_weight_std.0",
    "gpu_mem_allocated",
    "gpu_alloc_retries",
}
ENVIRON = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_MODULE_LOADING": "EAGER"}

SCRIPT = """
import sys

device = torch.device(DEVICE)
probe = getattr(sys.modules.get("_supervise_probe"), "_probe", None)
for fused in ("flash", "mem_efficient", "cudnn"):  # their gradients are not the same twice
    getattr(torch.backends.cuda, f"enable_{fused}_sdp")(False)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.num_experts, self.top_k = 4, 2
        self.gate = nn.Linear(16, 4, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k = (f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q_proj, self.k_proj))
        seen.append((q.detach().clone(), k.detach().clone()))
        y = F.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.drop(y) * self.gate(x).softmax(-1).amax(-1, keepdim=True)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 32)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def held():
    return [p.detach().clone() for p in model.parameters()]

model = Model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = [(torch.randn(4, 12, 8).to(device), torch.randint(0, 32, (48,)).to(device))
        for _ in range(STEPS)]
room = [torch.empty(1 << 17, device=device) for _ in range(64)]
del room  # of the allocator: to ask the driver for memory may wait
seen, kept, busy, waiting = [], [], [], []
for step, (x, y) in enumerate(data):
    old = held()
    torch.cuda.synchronize(device)
    with torch.cuda.device(device):
        torch.cuda._sleep(500_000_000)  # the device is a quarter of a second behind the host
    torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
    optimizer.zero_grad()
    logits = model(x).flatten(0, 1)
    loss = F.cross_entropy(logits, y)
    loss.backward()
    gradients = [p.grad.detach().clone() for p in model.parameters()]
    optimizer.step()
    busy.append(not torch.cuda.current_stream(device).query())
    waiting.append(probe.parts.rank.publisher.waiting if probe else 1)
    if step == STEPS - 1:
        try:
            loss.item()
        except RuntimeError as error:
            emit(noticed=str(error))
    torch.cuda.set_sync_debug_mode("default")
    kept.append((logits.detach().clone(), y, gradients, old, held(), seen[:]))
    seen.clear()

parts = probe.parts.context.guard.parts.items() if probe else ()
emit(busy=busy, waiting=waiting, errors={name: part.errors for name, part in parts if part.errors})
for step, (logits, y, gradients, old, new, seen) in enumerate(kept):
    moved = norm(b.double() - a.double() for a, b in zip(old, new))
    ahead = torch.ones(12, 12, dtype=torch.bool, device=device).triu(1)
    tops = [(q.double() @ k.double().transpose(-2, -1) / math.sqrt(8)).masked_fill(ahead, -math.inf)
            for q, k in seen]
    emit(step=step, train_loss_raw=F.cross_entropy(logits.double(), y).item(),
         grad_global_norm=norm(gradients), update_norm=moved, update_to_weight=moved / norm(old),
         max_attn_logit=max(top.max().item() for top in tops))
finish(model.cpu())
"""


@pytest.fixture(scope="module")
def devices():
    """How many there are; the test is skipped where there is none."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch.cuda.is_available() is false: this machine has no CUDA device")
    return torch.cuda.device_count()


@pytest.mark.parametrize("number", [0, 1])
def test_the_host_never_waits_and_nothing_changes(launch, devices, number):
    """Values arrive a step late and are right; weights are, to the last bit, those without a probe.

    The device is kept behind: had the host waited for it anywhere in a step, nothing were left to
    do behind the step. Nor does torch find a call that waits. Device 1 is not the current one.
    """
    if number >= devices:
        pytest.skip(f"this machine has {devices} CUDA devices")
    script = PREAMBLE + f"DEVICE, STEPS = 'cuda:{number}', {STEPS}\n" + SCRIPT
    bare = launch(script, environ={**ENVIRON, "PYTHONPATH": ""})
    job = launch(script, environ=ENVIRON, config={"sampling": SAMPLING})

    for each in (bare, job):
        assert "synchroniz" in each.output[0]["noticed"]
        assert all(each.output[1]["busy"][WARM:]), "the host has waited for the device"
    assert job.output[1]["errors"] == {} and job.kinds() == [] and "supervise" not in job.err
    assert set(job.output[1]["waiting"][WARM:]) == {1}
    assert job.output[2:] == bare.output[2:]  # the numbers and the weights, to the last bit

    rows = job.output[2:-1]
    assert [frame["step"] for frame in job.frames] == [row["step"] for row in rows]
    for frame, row in zip(job.frames, rows, strict=True):
        for name in row.keys() - {"step", "max_attn_logit"}:
            assert frame[name] == pytest.approx(row[name], rel=1e-5), (name, row["step"])
        if row["step"] and row["step"] % 4 == 0:
            assert frame["max_attn_logit"] == pytest.approx(row["max_attn_logit"], rel=1e-5)
    assert {name for frame in job.frames for name in frame} >= SAMPLED
    memory = [f for f in job.frames if f.get("gpu_mem_reserved") is not None]
    assert all(0.0 <= f["gpu_mem_allocated"] <= f["gpu_mem_reserved"] <= 100.0 for f in memory)
    assert len(memory) == 2
