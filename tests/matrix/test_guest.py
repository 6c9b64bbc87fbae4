"""A guest that never makes the host wait for a device, leaves nothing for the garbage collector,
and does not grow."""

import pytest

WATCH = '''
from torch.utils._python_dispatch import TorchDispatchMode

OURS = "_supervise_probe"
PASSED_ON = {("hooks.calls", "step"), ("hooks.install", "step_"),
             ("hooks.install", "scale_"), ("hooks.install", "unscale_"),
             ("hooks.install", "clip"), ("hooks.install", "loss"),
             ("hooks.install", "backward"), ("hooks.waits", "fetch"),
             ("hooks.waits", "start"), ("hooks.calls", "__call__")}
ARRIVED = {("runtime.scalars", "read"),        # values, a step ago
           ("sampling.watch", "_router")}      # a copy on the host, which has arrived
waited = {}


def note(name):
    """Count a call if the nearest Python code that is not torch's is the probe's."""
    frame, through = sys._getframe(2), False
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "torch":
        frame, through = frame.f_back, True
    if frame is None or not frame.f_globals["__name__"].startswith(OURS):
        return
    where = frame.f_globals["__name__"][len(OURS) + 1 :], frame.f_code.co_name
    if through and where in PASSED_ON:   # torch's own function at work for the job
        return
    if where not in ARRIVED:
        key = f"{name} in {where[0]}.{where[1]}"
        waited[key] = waited.get(key, 0) + 1


def watch(kind, name):
    original = getattr(kind, name)

    def entry(*args, **kwargs):
        note(name)
        return original(*args, **kwargs)

    setattr(kind, name, entry)


for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__",
             "__array__", "is_nonzero", "equal", "allclose", "nonzero", "unique", "masked_select",
             "__repr__", "__format__", "__contains__"):
    watch(torch.Tensor, name)
for name in ("equal", "allclose", "nonzero", "unique", "is_nonzero", "masked_select", "argwhere"):
    watch(torch, name)
watch(torch.cuda, "synchronize")

WAITS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero",
         "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"}


class Below(TorchDispatchMode):
    """The same below Python: what a call makes torch do.

    It passes for one of torch's own kinds, which stay: the probe takes those of a job off.
    """

    _mode_key = torch._C._TorchDispatchModeKey.FUNCTIONAL

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in WAITS:
            note(function._schema.name)
        if function._schema.name == "aten::index" and any(
            getattr(i, "dtype", None) in (torch.bool, torch.uint8) for i in args[1] if i is not None
        ):
            note("boolean index")
        return function(*args, **(kwargs or {}))
'''

LOOPS = {
    "transformer": """
layers = [nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True) for _ in range(2)]
model = nn.Sequential(nn.Embedding(32, 16), *layers, nn.Linear(16, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for n in range(10):
    optimizer.zero_grad()
    for _ in range(2):
        x, y = torch.randint(0, 32, (2, 6)), torch.randint(0, 32, (2, 6))
        y[:, 0] = -100
        (F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
""",
    "experts": """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.num_experts, self.top_k, self.capacity_factor = 4, 2, 1.0
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        q, k = self.q_proj(x), self.k_proj(x)
        x = x + (q @ k.transpose(-2, -1) / 4).softmax(-1) @ k
        weight, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.stack([expert(x) for expert in self.experts], -2)
        picked = out.gather(-2, chosen[..., None].expand(*chosen.shape, 16))
        return x + (weight[..., None] * picked).sum(-2)

model = nn.Sequential(nn.Embedding(32, 16), nn.Sequential(Layer(), Layer()), nn.Linear(16, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for n in range(10):
    optimizer.zero_grad()
    x, y = torch.randint(0, 32, (2, 12)), torch.randint(0, 32, (24,))
    F.cross_entropy(model(x).flatten(0, 1), y).backward()
    optimizer.step()
""",
    "scaled": """
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(
    [{"params": model[0].parameters()},
     {"params": model[1:].parameters(), "lr": torch.tensor(0.1)}], lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(
    torch.randn(60, 8), torch.randint(0, 4, (60,))), batch_size=6)
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "by-hand": """
model = nn.Linear(8, 4)
for n in range(60):
    model.zero_grad()
    F.cross_entropy(model(torch.randn(6, 8)), torch.randint(0, 4, (6,))).backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
""",
}
SETS = ("attention", "activations", "routing", "routers", "weights", "gradients", "checksums")


def watched(loop, below=True):
    body = "".join(f"    {line}\n" for line in LOOPS[loop].splitlines())
    where = "Below()" if below else "torch.enable_grad()"
    return f"import sys\n{WATCH}\nwith {where}:\n{body}\nemit(waited=waited)\nfinish(model)\n"


@pytest.mark.parametrize(
    ("loop", "below"),
    [*((loop, True) for loop in LOOPS), ("transformer", False), ("experts", False)],
)
def test_nothing_waits_for_a_device(pair, loop, below):
    """Values of the CPU are taken for a device's. Counted at every entry of torch that waits, and
    below; but no forward is looked into where something stands below: that is counted without."""
    sampling = dict.fromkeys(SETS, 2)
    standing = {
        "skip_nonfinite": {"max": 3},
        "zero_nonfinite": {"max": 3},
        "update_clip": {"window": 4, "sigma": 1e6},
    }
    script = watched(loop, below)
    job = pair.probed.run(script, late=True, sampling=sampling, safeguards=standing, capacity=128)
    assert job.output[0]["waited"] == {} and job.err == ""
    assert len(job.frames) >= 8 and all("grad_global_norm" in frame for frame in job.frames)
    if loop == "experts":
        shown = {"router_weight_similarity", "router_conditioning"}
        shown |= set() if below else {"attn_entropy", "moe_drop_rate", "residual_rms", "logz_mean"}
        assert shown <= {name for frame in job.frames for name in frame}
    assert job.output[-1] == pair.bare.run(script).output[-1]
    on_the_host = pair.probed.run(script)
    assert on_the_host.output[0]["waited"], "the counter of calls is broken"


MODE = """
from torch.utils._python_dispatch import TorchDispatchMode

class Counter(TorchDispatchMode):
    seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))

with Counter():
"""


@pytest.mark.parametrize("loop", ["experts", "scaled"])
def test_a_dispatch_mode_of_the_job_sees_no_operation_of_ours(pair, loop):
    """A counter of FLOPs counts what it counts without us."""
    body = "".join(f"    {line}\n" for line in LOOPS[loop].splitlines())
    script = f"{MODE}{body}\nemit(seen=Counter.seen)\nfinish(model)\n"
    sampling = dict.fromkeys(SETS, 2)

    job = pair.probed.run(script, sampling=sampling, capacity=128)

    assert job.err == "" and all("grad_global_norm" in frame for frame in job.frames[1:])
    assert job.output == pair.bare.run(script).output


LEFT = """
import gc, sys, types

def name_of(thing):
    if isinstance(thing, types.FrameType):
        return thing.f_globals.get("__name__", "")
    return getattr(thing, "__module__", None) or getattr(type(thing), "__module__", "")

gc.collect()
gc.disable()
for trial in range(4):
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for n in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(6, 8)), torch.randint(0, 4, (6,)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    del model, optimizer, scaler, loss
gc.set_debug(gc.DEBUG_SAVEALL)
gc.collect()
left = {}
for thing in gc.garbage:
    name = str(name_of(thing))
    if name.startswith("_supervise_probe") or name == "sitecustomize":
        kind = f"{name}.{type(thing).__name__}"
        left[kind] = left.get(kind, 0) + 1
gc.set_debug(0)
emit(left=left)
"""


@pytest.mark.parametrize("late", [False, True], ids=["host", "device"])
def test_no_cycle_of_ours_is_left_to_the_collector(pair, late):
    """Eighty steps of four models with the collector off: nothing that it finds then is ours."""
    sampling = dict.fromkeys(SETS, 5)
    job = pair.probed.run(
        LEFT, late=late, sampling=sampling, savepoints={"every": 5, "keep": 2, "max_bytes": 1 << 20}
    )
    assert job.output == [{"left": {}}] and job.err == ""


GROWTH = """
import gc
model = nn.Linear(4, 2)
x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def pages():      # of memory; those of files come in as they are first used
    with open("/proc/self/statm") as statm:
        resident, shared = map(int, statm.read().split()[1:3])
    return resident - shared

def descriptors():
    return len(os.listdir("/proc/self/fd"))

for n in range(2500):
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    if n == 500:
        for _ in range(2):    # the first look itself takes memory
            gc.collect()
            before = pages(), len(gc.get_objects()), descriptors()
gc.collect()
after = pages(), len(gc.get_objects()), descriptors()
emit(kib=4 * (after[0] - before[0]), objects=after[1] - before[1], descriptors=after[2] - before[2])
"""


def test_nothing_grows(pair):
    """Over 2000 steps behind a warm-up of 500: memory, objects, files (`make soak`: 100 000)."""
    job = pair.probed.run(GROWTH)
    assert job.segment().beat().phase == "exiting" and job.err == ""
    assert job.frames[-1]["step"] == 2499
    (told,) = job.output
    assert told["kib"] <= 1024 and told["objects"] <= 64 and told["descriptors"] <= 0
