"""The probe is a guest: nothing that the job can see, keep, save, compile or catch is changed."""

import pytest

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

SAVED = """
import copy, pickle
from pathlib import Path
for _ in range(3):
    step()
model.loss = F.cross_entropy
torch.save(model, "model.pt")
torch.save({"optimizer": optimizer, "state": optimizer.state_dict()}, "optimizer.pt")
twin = copy.deepcopy(model)
twin(torch.randn(2, 8)).sum().backward()
raw = pickle.dumps(twin) + Path("model.pt").read_bytes() + Path("optimizer.pt").read_bytes()
assert b"supervise" not in raw and vars(copy.copy(model)).keys() == vars(model).keys() - {
    "_compiled_call_impl"}
graph = torch.fx.symbolic_trace(model)
copy.deepcopy(graph)
replica = model._replicate_for_data_parallel()
assert "_compiled_call_impl" not in vars(replica)
step()
"""


def test_models_are_saved_and_copied_without_a_trace(probed, bare):
    """A whole model that is saved under the probe loads where there is none."""
    job = probed.run(MODEL + SAVED)
    assert job.err == "" and len(job.frames) == 4
    path = str(job.folder / "model.pt")
    code = f"emit(shape=torch.load({path!r}, weights_only=False)(torch.ones(1, 8)).shape)"
    assert bare.run(code).output == [{"shape": [1, 4]}]


ITERATORS = """
def losses():
    return (F.cross_entropy(model(torch.randn(8, 8)), torch.arange(8) % 4) for _ in range(2))

for make in (list, tuple, iter, lambda some: map(lambda x: x, some), lambda some: some):
    for _ in range(2):
        optimizer.zero_grad()
        torch.autograd.backward(make(losses()))
        nn.utils.clip_grad_norm_(make(model.parameters()), 0.01)
        nn.utils.clip_grad_value_(make(model.parameters()), 0.001)
        optimizer.step()
optimizer = torch.optim.SGD(iter([model[0].weight]), lr=0.1)
optimizer.add_param_group({"params": map(lambda p: p, model[2].parameters())})
scaler = torch.amp.GradScaler("cpu")
for _ in range(3):
    optimizer.zero_grad()
    torch.autograd.backward(scaler.scale(losses()))
    scaler.step(optimizer)
    scaler.update()
finish(model)
"""


def test_iterators_reach_torch_whole(probed, bare):
    """Losses, parameters and groups of them may be given as anything that ends after one pass."""
    job, straight = probed.run(MODEL + ITERATORS), bare.run(MODEL + ITERATORS)
    assert job.output == straight.output and job.err == ""
    assert len(job.frames) == 13 and None not in job.column("train_loss")


CLONED = """
def clone_module(module, copy_attributes):
    clone = module.__new__(type(module))
    copy_attributes(clone, module)
    for name in ("_parameters", "_buffers", "_modules"):
        clone.__dict__[name] = module.__dict__[name].copy()
    for name, p in module._parameters.items():
        clone._parameters[name] = p.clone()
    for name, child in module._modules.items():
        clone._modules[name] = clone_module(child, copy_attributes)
    return clone

def replaced(clone, module):
    clone.__dict__ = module.__dict__.copy()

def updated(clone, module):
    clone.__dict__.update(module.__dict__)

def adapt(module, gradients):
    for child in module.modules():
        for name, p in child._parameters.items():
            child._parameters[name] = p - 0.5 * next(gradients)

for way in (replaced, updated):
    for _ in range(5):
        x, y = torch.randn(16, 8), torch.randn(16, 4)
        optimizer.zero_grad()
        learner = clone_module(model, way)
        loss = F.mse_loss(learner(x), y)
        adapt(learner, iter(torch.autograd.grad(loss, [*learner.parameters()], create_graph=True)))
        (F.mse_loss(learner(x), y) + F.mse_loss(model(x), y)).backward()
        optimizer.step()
finish(model, learner.train(False))
model = optimizer = None
emit(alone=learner(x).sum().item())
"""


def test_a_module_with_the_attributes_of_another_runs_its_own_weights(probed, bare):
    """Of clones that copy the whole dict, as MAML makes them; also when the original is gone."""
    job, straight = probed.run(MODEL + CLONED), bare.run(MODEL + CLONED)
    assert job.output == straight.output and job.err == ""
    assert len(job.frames) == 10 and None not in job.column("batch_fingerprint")


CLONE_TRAINED = """
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
clone = clone_module(model, WAY)
for part in clone.modules():
    for name, p in part._parameters.items():
        part._parameters[name] = nn.Parameter(p.detach())
del model, optimizer
optimizer = torch.optim.SGD(clone.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    clone(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
finish(clone)
"""


@pytest.mark.parametrize("way", ["replaced", "updated"])
def test_a_module_that_got_the_attributes_of_another_is_watched_where_it_is_trained(
    probed, bare, way
):
    script = MODEL + CLONED.partition("for way in")[0] + CLONE_TRAINED.replace("WAY", way)
    job, straight = probed.run(script), bare.run(script)
    assert job.output == straight.output and job.err == ""
    unseen = [i for i, value in enumerate(job.column("batch_fingerprint")) if value is None]
    assert len(job.frames) == 8 and unseen == [3]  # its first step shows that it is trained


GRAPHS = """
import dataclasses, weakref

class Marked(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.large = torch.zeros(1000)
        alive.append(weakref.ref(context.large))
        return x * 1

    @staticmethod
    def backward(context, gradient):
        return gradient

@dataclasses.dataclass
class Given:
    x: torch.Tensor

class Plain:
    def __init__(self, x):
        self.x = x

class Head(nn.Linear):
    def forward(self, given):
        while not isinstance(given, torch.Tensor):
            given = given["x"] if isinstance(given, dict) else (
                given[0] if isinstance(given, (list, tuple)) else given.x)
        return super().forward(given)

encoder, head, alive = nn.Linear(8, 8), Head(8, 4), []
optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
for way in (lambda x: x, lambda x: {"x": [x]}, lambda x: (Given(x),), Plain):
    for _ in range(3):
        optimizer.zero_grad()
        head(way(encoder(torch.randn(2, 8)))).sum().backward()
        optimizer.step()
    most = 0
    for _ in range(12):  # an evaluation with gradients on
        output = head(way(Marked.apply(encoder(torch.randn(2, 8)))))
        most = max(most, sum(reference() is not None for reference in alive))
    emit(most=most)
"""


def test_graphs_of_forwards_without_a_backward_go_with_their_outputs(probed, bare):
    """Inputs that wait to be looked at hold nothing that they were computed from."""
    job, straight = probed.run(GRAPHS), bare.run(GRAPHS)
    assert job.output == straight.output and job.err == ""
    found = job.column("batch_fingerprint")
    assert len(found) == 12 and None not in found[1:9] and len(set(found[1:9])) == 8


FREED = """
import gc, weakref
gc.disable()
base = None
for trial in range(20):  # 60 steps: with 64, the next one is another training
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    gone = weakref.ref(model)
    probe = __import__("sys").modules["_supervise_probe"]._probe
    del model, optimizer
    assert gone() is None, trial
    if trial == 5:
        base = len(gc.get_objects())
emit(grown=len(gc.get_objects()) - base, known=len(probe.parts.optimizers.living()))
"""


def test_nothing_is_kept_alive(probed):
    """Models go when the job lets them go, without the garbage collector; nothing grows."""
    job = probed.run(FREED, savepoints={"every": 2, "keep": 4, "max_bytes": 1 << 24})
    # 14 trainings: windows that fill take 50 objects, models that were kept would take hundreds.
    assert job.output[0]["known"] == 0 and job.output[0]["grown"] < 120


BROKEN = """
probe = __import__("sys").modules["_supervise_probe"]._probe

def boom(*args):
    raise RuntimeError("no such luck")

def dear(*args):
    end = time.thread_time() + 0.01
    while time.thread_time() < end:
        pass

calls = probe.parts.collectors.plan.now["{call}"]
part = probe.parts.context.guard.part("{part}")
calls[:] = [(p, {what} if p is part else f) for p, f in calls]
for _ in range(70):
    step()
finish(model)
"""


@pytest.mark.parametrize(
    ("call", "part", "what", "why"),
    [
        ("collect", "loss", "boom", "RuntimeError: no such luck (train.py:"),
        ("after_update", "timing", "dear", "cost 10."),
    ],
)
def test_a_collector_that_fails_or_is_dear_is_switched_off(probed, bare, call, part, what, why):
    """It is said once, the others go on, and training is the same to the bit."""
    job = probed.run(MODEL + BROKEN.format(call=call, part=part, what=what))
    status = job.segment().status()["collectors"]
    assert status.pop(part).startswith(f"off: {why}") and set(status.values()) == {"on"}
    others = ["measurement-changed"]  # where the steps are short
    assert [kind for kind in job.kinds() if kind not in others] == ["collector-off"]
    assert len(job.frames) == 70
    straight = bare.run(MODEL + "for _ in range(70):\n    step()\nfinish(model)")
    assert job.output == straight.output and job.err == ""


DEAD = """
probe = __import__("sys").modules["_supervise_probe"]._probe
for n in range(10):
    if n == 4:
        probe.parts.tracker.finish_round = None
    step()
finish(model)
"""


def test_a_broken_probe_goes_off_and_the_job_goes_on(probed, bare):
    """Whatever breaks inside: the weights are those of an undisturbed run, and a mark says why."""
    job = probed.run(MODEL + DEAD)
    assert "TypeError" in job.marks["off"] and job.segment().status()["tier"] == "T0"
    straight = bare.run(MODEL + "for n in range(10):\n    step()\nfinish(model)")
    assert job.output == straight.output and job.err == ""


ALARM = """
import signal
probe = __import__("sys").modules["_supervise_probe"]._probe

class TooLate(Exception):
    pass

def handler(number, frame):
    raise TooLate

def wait(*args):
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    time.sleep(1)

signal.signal(signal.SIGALRM, handler)
step()
step()
part = probe.parts.context.guard.part("loss")
probe.parts.collectors.plan.now["before_update"].append((part, wait))
try:
    step()
except TooLate:
    emit(caught=True)
"""


def test_what_a_signal_handler_raises_reaches_the_job(probed):
    """Even if the signal comes while the probe runs."""
    assert probed.run(MODEL + ALARM).output == [{"caught": True}]


RAISES = """
class Moody(torch.optim.SGD):
    def step(self, closure=None):
        if self.param_groups[0].pop("sulk", False):
            raise ValueError("not today")
        return super().step(closure)       # two classes with a step: still one step

model = nn.Linear(4, 1)
optimizer = Moody(model.parameters(), lr=torch.tensor(0.1))
step = 0
while step < 8:
    if step == 4:
        barrier("go")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.param_groups[0]["sulk"] = step == 6
    try:
        optimizer.step()
    except ValueError as error:
        emit(error=str(error), lr=optimizer.param_groups[0]["lr"].item())
        optimizer.step()
    step += 1
"""


def test_a_step_that_raises_is_put_right(probed):
    """The job gets its exception and its own rate back; the step that succeeds then is counted."""
    job = probed.start(RAISES)
    job.send("lr_scale", value=0.5)
    job.go()
    probed.wait(job)
    assert job.output == [{"error": "not today", "lr": pytest.approx(0.1)}]
    assert [frame["step"] for frame in job.frames] == list(range(8))
    assert job.column("learning_rate")[6] == pytest.approx(0.05)
