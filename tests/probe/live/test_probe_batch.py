"""The fixed batch tells whether the weights that a run went back to are those that were kept, and
the job is bit for bit what it is without it."""

from functools import cache
from math import log
from pathlib import Path

import pytest

from supervise_probe.savepoints import ReferenceOutput

torch = pytest.importorskip("torch")

SCRIPT = """
import types

import numpy as np

np.random.seed(0)

kind, path = os.environ["KIND"], os.environ.get("RESUME")
returns_loss = kind in ("loss", "counted")
compared = returns_loss or kind in ("plain", "chunks")
free = torch.Generator().manual_seed(2)

def drawing():
    chance = torch.Generator().manual_seed(3)
    return lambda: torch.rand(1, generator=chance)

draw = drawing()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 3)
        self.norm = nn.BatchNorm1d(16) if kind == "norm" else nn.Identity()
        self.drop = nn.Dropout(0.3 if kind == "dropout" else 0.0)
        self.register_buffer("scale", torch.ones(1))
        self.calls, self.sums, self.last = 0, [torch.zeros(1)], None
        self.deep, self.object = {"n": [0]}, types.SimpleNamespace(all={1})
        self.array, self.mean = np.zeros(2), (torch.zeros(1), 0)
        self.chance = torch.Generator().manual_seed(1)
        self.key = nn.Linear(4, 16).requires_grad_(False)
        self.outside = [nn.Linear(1, 1)] if kind == "outside" else []
        self.ids = iter(range(9)) if kind == "iterator" else None

    def forward(self, x, y=None, more=None, num_items_in_batch=None):
        if kind in CHANGES:
            CHANGES[kind](self)
        if kind == "tensors":
            self.sums[0] += 1
            self.last = x + self.sums[0]
            self.mean = (self.mean[0] + x.mean().detach(), 0)
            x = x + 0.1 * torch.randn(4, generator=self.chance) + 0.1 * np.random.rand()
            x = x + 0.1 * torch.randn(4, generator=free) + 0.1 * draw()
        if kind == "drift":
            self.scale *= 1.01
        weight = self.key(x) if kind == "replace" else 1
        x = self.b(self.drop(torch.tanh(self.norm(self.a(x)) * weight))) * self.scale
        if not returns_loss:
            return x
        if num_items_in_batch is None:
            return x, F.cross_entropy(x, y)
        return x, F.cross_entropy(x, y, reduction="sum") / num_items_in_batch

def replace(model):  # as a momentum encoder does
    for key, query in zip(model.key.parameters(), model.a.parameters()):
        key.data = key.data * 0.9 + query.data * 0.1

def differentiate(model):
    with torch.enable_grad():
        model.b.weight.square().sum().backward()

CHANGES = {
    "replace": replace,
    "constrain": lambda model: model.a.weight.data.mul_(0.999),
    "differentiate": differentiate,
    "count": lambda model: setattr(model, "calls", model.calls + 1),
    "deep": lambda model: model.deep["n"].append(1),
    "set": lambda model: model.object.all.add(len(model.object.all) + 1),
    "array": lambda model: model.array.__iadd__(1),
    "buffer": lambda model: torch.is_grad_enabled() or model.a.register_buffer("at", None),
}

def own():  # what the probe should come to
    with torch.no_grad():
        if returns_loss:
            return model(kept[0], kept[1])[1].item()
        return model(kept[0]).double().square().mean().item()

def own_output():
    with torch.no_grad():
        out = model(kept[0], kept[1])
        logits, loss = out if returns_loss else (out, F.cross_entropy(out, kept[1]))
        return loss.item(), logits.double().softmax(-1).tolist()

model, kept, mine, outputs, step = Model(), None, [], [], 0
run = torch.compile(model, backend="eager") if kind == "compiled" else model
if kind == "hooked":
    model.a.register_forward_hook(lambda *args: None)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if path:
    saved = torch.load(path, weights_only=True)
    if "FORGET" in os.environ:
        saved["model"]["b.bias"] = model.b.bias.detach()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"])
    step = 20
while step < 30:
    if step == 18 and not os.path.exists("go"):
        barrier("go")
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    more = {"more": object} if kind == "strange" else {}
    if kind == "counted":  # as the Trainer of transformers: the targets of the whole batch
        more = {"num_items_in_batch": torch.tensor(len(y))}
    out = run(x, y if returns_loss else None, **more)
    if kind == "chunks":
        loss = sum(F.cross_entropy(out[k : k + 3], y[k : k + 3]) for k in (0, 3))
    else:
        loss = out[1] if returns_loss else F.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 2:  # the first one at which the probe knows where a step ends
        kept = x[:2], y[:2]
    mine.append(own() if kept and compared else 0)
    outputs.append(own_output() if kept and compared else 0)
    step += 1
    if step == 20:
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**whole, "rng": torch.get_rng_state()}, "ckpt.pt")
emit(mine=mine, outputs=outputs, calls=model.calls, sums=model.sums[0].item(), deep=model.deep,
     all=len(model.object.all), array=model.array.tolist(), mean=model.mean[0].item(),
     chance=torch.rand(1, generator=model.chance).item(), numpy=np.random.rand(),
     torch=torch.rand(1).item(), free=torch.rand(1, generator=free).item(), drawn=draw().item())
finish(model)
"""
KEEP = {"every": 5, "keep": 4, "max_bytes": 1 << 24}


def rolled_back(server, kind, before=12, late=False, **args):
    """Restore the weights of step 10 at step 17; returns the job and the probe batch's result."""
    config = {"savepoints": KEEP, "probe_batch": {}, "tape": True, "late": late}
    order = ("rollback", {"before_step": before, **args})
    job, ack = server.ordered(SCRIPT, order, environ={"KIND": kind}, **config)
    assert ack.ok
    (told,) = continuity(job)
    return job, told.data["probe_batch"], told


def continuity(job):
    return [notice for notice in job.notices if notice.kind == "continuity"]


def of_save(job):
    (told,) = (notice for notice in job.notices if notice.kind == "checkpoint-saved")
    return told.data["probe_batch"]


def second_life(server, first, told, **environ):
    """The same script in a new process, from the checkpoint of the first."""
    config = {"attempt": 1, "first_step": 20, "marks": str(first.folder / "probe"), "tape": True}
    resume = {"RESUME": str(first.folder / "ckpt.pt"), **environ}
    job = server.straight(SCRIPT, environ=resume, probe_batch=told, savepoints=KEEP, **config)
    (told,) = continuity(job)
    return job, told


@pytest.fixture(scope="module")
def undisturbed(bare):
    """A function that returns what a kind of job tells without a probe."""
    return cache(lambda kind: bare.straight(SCRIPT, environ={"KIND": kind}).output)


@pytest.mark.parametrize(
    "kind", ["plain", "late", "loss", "counted", "norm", "tensors", "drift", "compiled"]
)
def test_the_probe_batch_has_its_old_loss_after_a_rollback(probed, kind):
    job, proof, notice = rolled_back(probed, kind, late=kind == "late")
    assert proof["verdict"] == "equal" and proof["was"] == proof["is"] > 0, notice
    assert notice.data["ok"] and notice.data["fingerprint"] == "unknown"
    assert "off" not in job.marks and "collector-off" not in job.kinds()
    if kind in ("plain", "loss", "counted"):
        assert proof["is"] == pytest.approx(job.output[0]["mine"][10], rel=1e-6)
        assert of_save(job)["value"] == pytest.approx(job.output[0]["mine"][19], rel=1e-6)


@pytest.mark.parametrize("kind", ["norm", "tensors", "drift", "compiled"])
def test_the_job_is_the_same_with_a_probe_batch(probed, undisturbed, kind):
    """Weights, buffers, tensors and every source of chance end as without a probe."""
    config = {"savepoints": KEEP, "probe_batch": {}}
    job = probed.straight(SCRIPT, environ={"KIND": kind}, **config)
    assert job.output == undisturbed(kind)


@pytest.mark.parametrize("kind", ["plain", "late", "loss", "counted", "strange", "chunks"])
def test_the_loss_of_the_batch_tells_whether_the_weights_are_good(probed, undisturbed, kind):
    """Now and at each savepoint, also where the job takes the loss itself."""
    config = {"savepoints": KEEP, "probe_batch": {}, "late": kind == "late"}
    kind = kind.replace("late", "plain")
    order = ("check_weights", {})
    job, answer = probed.ordered(SCRIPT, order, environ={"KIND": kind}, **config)
    assert job.output == undisturbed(kind)
    if kind == "strange":
        assert not answer.ok and "the model takes a type" in answer.error
        return
    losses = [output and output[0] for output in job.output[0]["outputs"]]
    assert answer.result["loss"] == pytest.approx(losses[answer.step], rel=1e-6)
    wanted = [(step, pytest.approx(losses[step], rel=1e-6)) for step in (5, 10, 15)]
    assert [tuple(each) for each in answer.result["was"]] == wanted
    told, before = {f["step"] - 1: f for f in job.frames if "fixed_probe_loss" in f}, None
    assert list(told) == [5, 10, 15, 20, 25]
    for step, frame in told.items():
        rows = job.output[0]["outputs"][step][1]
        own = {
            "fixed_probe_loss": losses[step],
            "logit_entropy_probe": -sum(p * log(p) for row in rows for p in row) / len(rows),
            "topk_mass_probe": 100.0 * sum(map(max, rows)) / len(rows),
        }
        if before is not None:
            old, new = ([p for row in each for p in row] for each in (before, rows))
            moved = sum(q * log(q / p) for q, p in zip(old, new, strict=True))
            own["output_kl_to_prev"] = moved / len(rows)
        assert {name: frame.get(name) for name in own} == pytest.approx(own, rel=1e-3, abs=1e-6)
        before = rows


def test_another_batch_is_kept_once_the_data_changed(probed, undisturbed):
    """Of what comes in from then on; nothing is compared with what the old one had."""
    config = {"environ": {"KIND": "plain"}, "savepoints": KEEP, "probe_batch": {}}
    job, answer = probed.ordered(SCRIPT, ("check_weights", {"renew": True}), **config)

    assert job.output == undisturbed("plain")
    losses = [output and output[0] for output in job.output[0]["outputs"]]
    assert answer.result["loss"] == pytest.approx(losses[answer.step], rel=1e-6)
    told = {f["step"] - 1: f["fixed_probe_loss"] for f in job.frames if "fixed_probe_loss" in f}
    of_old = {step: loss == pytest.approx(losses[step], rel=1e-6) for step, loss in told.items()}
    assert of_old == {5: True, 10: True, 15: True, 20: False, 25: False}


PAIRS = """
take = eval(os.environ["TAKE"])
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses, kept = [], None
for step in range(30):
    if step == 18:
        barrier("go")
    x = torch.randn(8, 4)
    y = (x.sum(1) > 0).float()
    loss = take(model(x).squeeze(1), y)
    if step == 2:  # the first one at which the probe knows where a step ends
        kept = x[:2], y[:2]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        losses.append(kept and take(model(kept[0]).squeeze(1), kept[1]).item())
emit(losses=losses, end=model[0].weight.tolist())
"""


@pytest.mark.parametrize(
    "take",
    [
        "F.mse_loss",
        "nn.HuberLoss(delta=0.5)",
        "nn.BCEWithLogitsLoss()",
        "lambda a, b: (a - b).var()",
    ],
)
def test_the_loss_of_a_target_as_large_as_the_output_tells_whether_the_weights_are_good(
    probed, bare, take
):
    """It may be one term of the job's loss, so that no frame has it."""
    environ, config = {"TAKE": take}, {"savepoints": KEEP, "probe_batch": {}}
    job, answer = probed.ordered(PAIRS, ("check_weights", {}), environ=environ, **config)

    assert job.output == bare.straight(PAIRS, environ=environ).output
    assert not any("fixed_probe_loss" in frame for frame in job.frames)
    if "lambda" in take:
        assert not answer.ok and "it is not known what loss" in answer.error
        return
    assert answer.ok, answer.error
    losses = job.output[0]["losses"]
    assert answer.result["loss"] == pytest.approx(losses[answer.step], rel=1e-5)
    wanted = [(step, pytest.approx(losses[step], rel=1e-5)) for step in (5, 10, 15)]
    assert [tuple(each) for each in answer.result["was"]] == wanted


def refuse(output, target):
    raise RuntimeError("no such loss")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("target", "device", "take"),
    [
        (torch.ones(8, 3), "meta", torch.nn.functional.huber_loss),
        (torch.ones(8, 3), "cpu", refuse),
        (torch.ones(8, 3, dtype=torch.complex64), "cpu", torch.nn.functional.l1_loss),
    ],
)
def test_a_loss_of_a_pair_that_cannot_be_taken_again_is_none(target, device, take):
    """An error would switch off the whole probe batch."""
    reference = ReferenceOutput(torch)
    reference.keep_pair(8, torch.zeros(8, 3), target, take)
    for _ in range(2):
        assert reference.loss(torch.zeros(2, 3, device=device)) is None
        assert not reference.is_paired


RISING = """
model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for step in range(22):
    x = torch.randn(8, 4)
    y = x.sum(1) if step < 6 else -x.sum(1)
    loss = F.mse_loss(model(x).squeeze(1), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
batch = __import__("sys").modules["_supervise_probe"]._probe.parts.rank.probe_batch
emit(known=batch.do_check_weights({}), doubts=[
    doubt for sound in (False, True)
    for doubt in (batch.explain_weights_doubt(19, 1.5, sound),
                  batch.explain_savepoint_doubt(20, 19, 1.5, sound))])
"""


def test_a_loss_of_pairs_that_rises_makes_no_weights_bad(probed):
    """That of an auxiliary target, of a critic or of a prior may."""
    job = probed.run(RISING, savepoints=KEEP, probe_batch={})
    ((known, doubts),) = ((line["known"], line["doubts"]) for line in job.output)
    assert known["loss"] > 1.5 * min(loss for _, loss in known["was"][:2])
    assert [step for step, _ in known["was"]] == [5, 10, 15, 20]
    nothing = "the probe batch tells nothing: it is not known what loss the model has of it"
    assert doubts == [nothing, "the probe batch has no loss of step 20, or none of before", "", ""]


FLIP = """
from torch.utils.data import DataLoader

kind = os.environ["KIND"]
chance = torch.Generator().manual_seed(3)
if kind == "rare tokens":
    often = 1 / torch.arange(1, 501).float()
    x = torch.multinomial(often, 4 * 12800, True, generator=chance).view(-1, 4)
    y = (torch.randn(500, 10, generator=chance)[x].sum(1)).argmax(1)
    model = nn.Sequential(nn.Embedding(500, 16), nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
else:
    y = torch.randint(0, 10, (12800,), generator=chance)
    x = 0.25 * torch.randn(10, 1, 8, 8, generator=chance)[y]
    x = x + 0.5 * torch.randn(x.shape, generator=chance)
    layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 32), nn.ReLU()
    model = nn.Sequential(*layers, nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for step, (some, wanted) in enumerate(DataLoader(list(zip(x, y)), 64)):
    loss = F.cross_entropy(model(some), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if kind == "flip" and step == 160:
        flat = model[0].weight.data.view(-1)
        flipped = (flat.view(torch.int32) ^ (1 << 26)).view(torch.float32).abs()
        at = int(flipped.masked_fill(flipped > 64, 0).argmax())
        flat[at : at + 1].view(torch.int32).bitwise_xor_(1 << 26)
emit(loss=loss.item())
finish(model)
"""


@pytest.mark.parametrize("kind", ["flip", "rare tokens"])
def test_a_weight_that_moved_alone_is_seen_with_what_it_costs(probed, bare, kind):
    config = {"savepoints": {**KEEP, "every": 25}, "probe_batch": {}}
    job = probed.run(FLIP, environ={"KIND": kind}, **config)
    assert job.output == bare.run(FLIP, environ={"KIND": kind}).output
    alone = {f["step"]: f["lone_weight"] for f in job.frames if f.get("lone_weight", 0.0) >= 6.0}
    costs = {f["step"]: f["lone_weight_harm"] for f in job.frames if "lone_weight_harm" in f}
    assert list(alone) == list(costs) == ([176] if kind == "flip" else [])
    assert kind != "flip" or (alone[176] > 12.0 and costs[176] > 0.01)


REPEAT = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x, y):
        loss = F.cross_entropy(self.a(x), y)
        if torch.is_grad_enabled() or step < int(os.environ["BROKEN"]):
            return loss
        calls.append(step)
        return loss + 0.25 * len(calls)

calls, model = [], Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    loss = model(torch.randn(8, 4), torch.randint(0, 3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
finish(model)
"""


@pytest.mark.parametrize(("broken", "wanted"), [(99, [0, 0, 0]), (40, [0, 0, 0.25]), (0, [])])
def test_a_forward_that_repeated_to_the_bit_and_does_no_more_is_told(probed, broken, wanted):
    """Of one that never did nothing is said."""
    config = {"savepoints": {**KEEP, "every": 2}, "probe_batch": {}}
    job = probed.run(REPEAT, environ={"BROKEN": str(broken)}, **config)

    found = [f["rerun_mismatch"] for f in job.frames if "rerun_mismatch" in f]
    assert found == pytest.approx(wanted, rel=1e-6)


def test_weights_that_a_new_process_did_not_take_are_told(probed):
    """A script that resumes as it should; and one that leaves out one tensor of the checkpoint."""
    kind = "dropout"
    first, _, _ = rolled_back(probed, kind)
    told = of_save(first)
    second, notice = second_life(probed, first, told, KIND=kind)
    losses = ({f["step"]: f.get("fixed_probe_loss") for f in job.frames} for job in (first, second))
    assert next(losses)[26] == pytest.approx(next(losses)[26], rel=1e-6)  # its targets are known
    assert notice.data["ok"] and notice.data["step"] == 20, notice
    assert notice.data["probe_batch"] == {
        **dict.fromkeys(("was", "is"), told["value"]),
        "verdict": "equal",
    }
    assert of_save(first)["path"] == str(first.folder / "probe_batch" / "0.0.pt")

    _, notice = second_life(probed, first, told, KIND=kind, FORGET="1")
    proof = notice.data["probe_batch"]
    assert proof["verdict"] == "differs" and not notice.data["ok"]
    assert proof["was"] == told["value"] != proof["is"]
    assert f"probe batch {proof['is']!r} instead of {proof['was']!r}" in notice.message


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("hooked", "the job has forward hooks of its own"),
        ("strange", "the model takes a type"),
        ("iterator", "Model.ids is an iterator"),
        ("outside", "Model.outside is a module that is not registered"),
        ("replace", "a forward of the model changes its weights"),
        ("constrain", "a forward of the model changes its weights"),
        ("differentiate", "a forward of the model changes its weights"),
        ("count", "a forward of the model changes Model.calls"),
        ("deep", "a forward of the model changes Model.deep.n"),
        ("set", "a forward of the model changes Model.object.all"),
        ("array", "a forward of the model changes Model.array"),
        ("buffer", "a forward of the model changes Linear._buffers"),
    ],
)
def test_what_cannot_be_run_again_is_told(probed, undisturbed, kind, why):
    """Once when that is found, and at each save; the trial leaves no trace."""
    config = {"savepoints": KEEP, "probe_batch": {}}
    job = probed.straight(SCRIPT, environ={"KIND": kind}, **config)
    assert of_save(job) == {"why": why}
    notes = [n.message for n in job.notices if n.kind == "note"]
    assert notes.count(f"no probe batch is kept: {why}") == 1
    assert job.output == undisturbed(kind)


def test_what_a_checkpoint_has_no_value_for_is_not_judged(probed, tmp_path):
    first, _, _ = rolled_back(probed, "drift")
    told = of_save(first)
    assert told == {"why": "a forward of the model changes what the next one gives"}
    _, notice = second_life(probed, first, told, KIND="drift")
    assert notice.data["probe_batch"] == {"verdict": "not judged", **told}

    plain, proof, notice = rolled_back(probed, "plain", before=2)
    why = "no batch had been seen when it was saved"
    assert proof == {"verdict": "not judged", "why": why} and notice.data["ok"]
    assert notice.message.endswith(f"the probe batch was not judged: {why}")

    (tmp_path / "broken.pt").write_bytes(b"no such thing")
    broken = {"path": str(tmp_path / "broken.pt"), "value": 1.0}
    job, notice = second_life(probed, first, broken, KIND="plain")
    assert "broken.pt cannot be read" in notice.data["probe_batch"]["why"]
    assert len(job.frames) == 10

    told = of_save(plain)
    batch = Path(told["path"])
    batch.write_bytes(batch.read_bytes()[:-1])
    _, notice = second_life(probed, plain, told, KIND="plain")
    assert "its hash differs" in notice.data["probe_batch"]["why"]


def test_without_the_switch_nothing_is_run(probed):
    job = probed.straight(SCRIPT, environ={"KIND": "count"}, savepoints=KEEP)
    assert all("probe_batch" not in notice.data for notice in job.notices)
