"""Savepoints and the way back to one: what is restored bit by bit, where they are stored within
their budgets, and what cannot be saved or restored."""

import time

import pytest

WRITTEN = """
import threading

def written():  # until the disk has what is being written
    while "supervise-background" in [thread.name for thread in threading.enumerate()]:
        time.sleep(0.001)

"""
# Per step the hash of all that updates change, the draw of the batch, the gradient that is left,
# and the scheduled rate.
STATES = """
import hashlib

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Dropout(0.1),
                                    nn.Linear(32, 1))

    def forward(self, x):
        self.calls += 1
        return self.layers(x)

model = Net()
average = torch.optim.swa_utils.AveragedModel(model)
optimizer = {optimizer}
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 40)

def content(value):
    if torch.is_tensor(value):
        return value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return b"".join(str(key).encode() + content(v) for key, v in value.items())
    if isinstance(value, (list, tuple)):
        return b"".join(map(content, value))
    return repr(value).encode()

def closure():
    optimizer.zero_grad(set_to_none=False)
    loss = (model(x) - 1).square().mean()
    loss.backward()
    return loss

for step in range(30):
    if step in {stops}:
        barrier(f"at-{{step}}")
    x = torch.randn(8, 4)
    optimizer.step(closure)
    rate = float(optimizer.param_groups[0]["lr"])
    schedule.step()
    all = [*model.state_dict().values(), *average.state_dict().values(), *optimizer.state.values()]
    emit(state=hashlib.sha256(content(all)).hexdigest(), draw=x.flatten().tolist(), rate=rate,
         gradient=sum(p.grad.abs().sum().item() for p in model.parameters()), calls=model.calls)
    average.update_parameters(model)
"""
ADAM = "torch.optim.AdamW(model.parameters(), lr=0.01)"
OPTIMIZERS = {
    "fused, a tensor as its rate": ADAM.replace("0.01", "torch.tensor(0.01), fused=True"),
    "lbfgs": "torch.optim.LBFGS(model.parameters(), lr=0.01)",
}
ROOM = 1 << 24


def states(*stops, optimizer=ADAM):
    return STATES.format(stops=stops, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_loop_goes_on_with_weights_buffers_averages_and_moments_of_the_savepoint(
    probed, optimizer
):
    """Twice, the second time to the same one. Gradients are gone; data, draws, attributes and the
    schedule stay where they are."""
    keep = {"every": 5, "keep": 3, "max_bytes": ROOM}
    job = probed.start(states(18, 22, optimizer=OPTIMIZERS[optimizer]), savepoints=keep)
    acks = [job.order("rollback", barrier=f"at-{at}", before_step=14) for at in (18, 22)]
    probed.wait(job)
    back = [ack.result["from_step"] for ack in acks]
    names = ("state", "draw", "rate", "gradient", "calls")
    hashes, draws, rates, gradients, calls = ([row[k] for row in job.output] for k in names)

    assert [ack.result["step"] for ack in acks] == [10, 10]
    assert hashes[back[0]] == hashes[back[1]] == hashes[10]
    assert len({*hashes}) == 28 and len({*map(tuple, draws)}) == 30
    assert rates == sorted({*rates}, reverse=True) and calls == sorted({*calls})
    assert [gradients[at] for at in back] == [0.0, 0.0] < [gradients[at - 1] for at in back]
    assert [f["attempt"] for f in job.frames] == sorted(f["attempt"] for f in job.frames)
    again = [frame["step"] for frame in job.frames if frame["attempt"] == 1]
    assert again == [*range(back[0] + 1, back[1] + 1)]
    told = [notice.data for notice in job.notices if notice.kind == "weights-restored"]
    assert told == [{"attempt": 1, "to": 10}, {"attempt": 2, "to": 10}]
    assert job.frames[-1]["steps_seen"] == 11 + 29 - back[1]


def size(probed):
    """Bytes of one savepoint of that job."""
    keep = {"every": 5, "keep": 3, "max_bytes": ROOM}
    _, ack = probed.ordered(states(18), ("savepoint", {}), barrier="at-18", savepoints=keep)
    return ack.result["bytes"]


@pytest.mark.parametrize("before", [9, 24])
def test_memory_stays_within_the_budget_and_going_back_is_exact(probed, tmp_path, before):
    """Memory for one and a half: all but the newest are on disk, in files without a name."""
    room = size(probed) * 3 // 2
    keep = {"every": 5, "keep": 6, "max_bytes": room, "spill": str(tmp_path)}
    script = WRITTEN + states(27).replace("x = torch", "written(); x = torch")
    orders = ("savepoint", {}), ("rollback", {"before_step": before})
    job, full, back = probed.ordered(script, *orders, barrier="at-27", savepoints=keep)
    outcome = back.result
    rows = [row["state"] for row in job.output]

    assert before - 5 <= outcome["step"] < before and outcome["not_restored"] == []
    assert rows[outcome["from_step"]] == rows[outcome["step"]]
    assert full.result["held"] <= room
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("only_one", [False, True])
def test_the_savepoint_that_is_retained_outlives_newer_ones(probed, only_one):
    """Until the request is over. Where only one fits, no other is taken beside it."""
    room = {"keep": 9, "max_bytes": 2 * size(probed) - 1} if only_one else {"keep": 3}
    room = {"max_bytes": ROOM, **room}
    job = probed.start(states(7, 20, 28), savepoints={"every": 5, "spill": None, **room})
    job.reached("at-7")
    job.segment().retain_savepoint_before(9, time.monotonic_ns() + 10**12)
    job.go("at-7")
    job.reached("at-20")
    told = [n.message for n in job.notices if "no savepoint is taken for now" in n.message]
    job.go("at-20")
    ack = job.order("rollback", barrier="at-28", before_step=9)
    probed.wait(job)
    rows = [row["state"] for row in job.output]

    assert ack.result["step"] == 5 and rows[ack.result["from_step"]] == rows[5]
    assert [text.split("now: ")[1] for text in told] == only_one * [
        "the savepoint of step 5 is kept for a possible rollback, and there is no room for "
        "another beside it"
    ]
    let_go = probed.start(states(7, 20, 28), savepoints={"every": 5, "spill": None, **room})
    for stop in (7, 20):
        let_go.reached(f"at-{stop}")
        let_go.segment().retain_savepoint_before(
            9 if stop == 7 else 0, time.monotonic_ns() + 10**12
        )
        let_go.go(f"at-{stop}")
    refusal = let_go.order("rollback", barrier="at-28", before_step=9)
    probed.wait(let_go)
    assert "there is no savepoint before step 9" in refusal.error


SMALL = """
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

def train_step():
    loss = model(torch.ones(4)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

SETUP
for n in range(16):
    if n == 11:
        barrier("go")
    written()
    train_step()
    AFTER
finish(model)
"""


def small(setup="", after="pass"):
    return WRITTEN + SMALL.replace("SETUP", setup).replace("AFTER", after)


OLDEST = ("rollback", {"before_step": 0})  # is told
ONE = 68  # bytes: 5 parameters, two moments each, two counts of steps


@pytest.mark.parametrize(
    ("room", "says"),
    [
        ({"keep": 4}, "the oldest is of step 4"),
        ({"keep": 4, "max_bytes": 2 * ONE}, "the oldest is of step 8"),
        ({"keep": 4, "max_bytes": 2 * ONE - 1}, "the oldest is of step 10"),
        (
            {"keep": 4, "max_bytes": ONE - 1},
            f"one savepoint takes {ONE} bytes, more than the {ONE - 1} that are allowed",
        ),
        ({"max_bytes": ONE, "spill": "{folder}"}, "the oldest is of step 1"),
        ({"max_bytes": ONE, "spill": "{folder}", "max_disk_bytes": 3 * ONE}, "is of step 6"),
        ({"max_bytes": ONE, "spill": "{folder}", "max_disk_bytes": ONE - 1}, "is of step 10"),
    ],
)
def test_a_budget_drops_the_oldest_and_refuses_when_not_even_one_fits(probed, tmp_path, room, says):
    keep = {"every": 2, "keep": 9, "max_bytes": ROOM, "spill": None, **room}
    if keep["spill"]:
        keep["spill"] = str(tmp_path)
    _, ack = probed.ordered(small(), OLDEST, savepoints=keep)
    assert not ack.ok and says in ack.error


def test_a_disk_that_fails_costs_the_savepoint_and_is_told(probed, tmp_path):
    keep = {"every": 2, "keep": 4, "max_bytes": ONE, "spill": str(tmp_path / "gone")}
    job, ack = probed.ordered(small(), OLDEST, savepoints=keep)
    (first, *_) = [n.message for n in job.notices if n.kind == "note"]
    assert "the savepoint of step 1 could not be written to" in first
    assert "No such file or directory" in first
    assert "the oldest is of step 10" in ack.error


def rolled_back(probed, script, before=9, **keep):
    """Give the order behind step 10 or 11; returns the job and the ack."""
    keep = {"every": 4, "keep": 4, "max_bytes": ROOM, **keep}
    return probed.ordered(script, ("rollback", {"before_step": before}), savepoints=keep)


DAMAGE = """
for name in os.listdir("/proc/self/fd"):
    link = f"/proc/self/fd/{name}"
    if os.path.lexists(link) and "%s" in os.readlink(link):
        os.pwrite(os.open(link, os.O_WRONLY), b"x", 5)
"""


def test_a_savepoint_that_comes_back_otherwise_than_it_went_is_refused(probed, tmp_path):
    damage = (DAMAGE % tmp_path.name).replace("\n", "\n        ")
    script = small().replace('barrier("go")', 'barrier("go")' + damage)
    job, ack = rolled_back(probed, script, 6, every=3, max_bytes=ONE, spill=str(tmp_path))
    assert "cannot be read back: the content read back differs from what was written" in ack.error
    assert job.output == probed.straight(script).output


SHARDED = """
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
model = nn.Module()
model.weight = nn.Parameter(distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)]))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(16):
    if step == 12:
        barrier("go")
        held["exp_avg"] = held["exp_avg"].clone()  # the tensor that was saved is gone
    (model.weight**2).sum().to_local().backward()
    optimizer.step()
    optimizer.zero_grad()
    held = optimizer.state[model.weight]
    emit(weight=model.weight.to_local().tolist(), moments=held["exp_avg"].to_local().tolist())
distributed.destroy_process_group()
"""


def test_a_shard_goes_back_where_it_was_and_a_lost_one_is_made_again(probed):
    """One rank is enough: how a part is copied does not depend on how many there are."""
    job, ack = rolled_back(probed, SHARDED, every=5)
    assert ack.ok, ack.error
    assert job.output[ack.result["from_step"]] == job.output[5]


SCALED = """
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

def train_step():
    scaler.scale(model(torch.ones(3, 4)).sum()).backward()
    scaler.step(optimizer)
    emit(scale=scaler.get_scale())
    scaler.update()
    optimizer.zero_grad()
"""
COUNTER = """
class Counter:
    n = 0

"""


def test_a_scaler_goes_back_with_the_weights(probed):
    job, ack = rolled_back(probed, small(SCALED))
    scales = [row["scale"] for row in job.output[:-1]]
    at = ack.result["from_step"]
    assert ack.result["step"] == 8 and scales[at : at + 2] == scales[8:10] == [64.0] * 2


def test_state_that_cannot_be_restored_is_named(probed):
    after = "optimizer.state[model.weight]['counter'] = Counter()"
    _, ack = rolled_back(probed, small(COUNTER, after))
    assert ack.result["not_restored"] == ["AdamW.state['counter']"]


OVERLAPPING = """
base = torch.ones(3)
for name in ("same", "written", "other"):
    model.register_buffer(name, (base if name == "same" else base.clone())[:1].expand(4))
"""
WRITTEN_SINCE = """if n == 9:
        model.written[:1].fill_(5.0)
        model.other.set_(torch.full((2, 4), 7.0))
    if n > 8:
        emit(shapes=[list(b.shape) for b in model.buffers()],
             sums=[b.sum().item() for b in model.buffers()],
             was=model.same.data_ptr() == base.data_ptr())"""


def test_a_buffer_whose_memory_overlaps_is_made_again_unless_it_is_as_it_was(probed):
    """No copy can be written into it; into one of another shape a copy would be broadcast."""
    job, ack = rolled_back(probed, small(OVERLAPPING, WRITTEN_SINCE))
    assert ack.ok and ack.result["not_restored"] == []
    before, *_, after = job.output[:-1]
    assert before == {"shapes": [[4], [4], [2, 4]], "sums": [4.0, 20.0, 56.0], "was": True}
    assert after == {"shapes": [[4], [4], [4]], "sums": [4.0, 4.0, 4.0], "was": True}


# A new parameter at the address of the old one, which is all that an id tells.
REPLACED = """if n == 10:
        number, spare[0] = id(spare[0]), None
        del model.spare
        made = [nn.Parameter(ones)]
        while id(made[-1]) != number and len(made) < 9999:
            made.append(nn.Parameter(ones))
        spare[0] = made[-1]"""
SPARE = """
model.spare = nn.Parameter(torch.zeros(2))
optimizer.add_param_group({"params": [model.spare]})
spare, ones = optimizer.param_groups[1]["params"], torch.ones(2)
"""
THAWED = """if n == 9:
        optimizer.state[spare[0]]["exp_avg"] = ones
    emit(states=len(optimizer.state))"""


def test_state_that_an_optimizer_made_since_the_savepoint_goes(probed):
    """As the moments of a layer that was thawed: they are of updates that are taken back."""
    job, ack = rolled_back(probed, small(SPARE, THAWED))
    at = ack.result["from_step"]
    assert ack.ok, ack.error
    assert [row["states"] for row in job.output[8 : at + 1]] == [2, *[3] * (at - 9), 2]


IN_BACKWARD = """
def step_in_backward(parameter):
    optimizer.step()
    optimizer.zero_grad()

def train_step():
    model(torch.ones(4)).sum().backward()

model.weight.register_post_accumulate_grad_hook(step_in_backward)
"""
NO_MODULE = """
optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)
optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
train_step = optimizer.step
"""
SPARSE = "model.odd = nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)"


@pytest.mark.parametrize(
    ("setup", "after", "reason"),
    [
        (IN_BACKWARD, "pass", "the step is made inside backward, which cannot be undone"),
        (
            SPARSE + "\nfinish = lambda model: None",
            "pass",
            "Linear.odd is a Parameter on cpu, laid out as torch.sparse_coo; only dense tensors on "
            "CPU or CUDA can be saved",
        ),
        (
            NO_MODULE,
            "pass",
            "SGD trains tensors that are no parameters of a module: copies of the weights may be "
            "kept elsewhere, and a rollback would miss them",
        ),
        (SPARE, REPLACED, "the parameters of AdamW were replaced since the savepoint"),
        (
            "",
            "if n == 10: model.weight = nn.Parameter(torch.zeros(1, 4))",
            "Linear.weight was replaced since the savepoint",
        ),
    ],
    ids=["in-backward", "sparse", "no-module", "same-id", "replaced"],
)
def test_weights_that_cannot_be_restored_are_left_alone(probed, bare, setup, after, reason):
    script = small(setup, after)
    job, ack = rolled_back(probed, script)
    assert not ack.ok and reason in ack.error
    assert job.output == bare.straight(script).output
