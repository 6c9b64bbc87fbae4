"""Checkpoints in the job's own format. Each script saves at step 8 itself, as `at-8.pt`; the one
that is ordered there has to hold the same, and nothing else about the run may change."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

NANO = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 16)
        self.head.weight = self.embed.weight            # tied

    def forward(self, x):
        return self.head(self.drop(self.embed(x)))

eval_interval = 4
config = {"eval_interval": eval_interval, "n": 3}       # equals the first step that is saved
model_args = dict(width=8, name="nano")
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
iter_num, best_val_loss = 0, 1e9

def get_batch():
    x = torch.randint(0, 16, (4, 6))
    return x[:, :-1], x[:, 1:]

@torch.no_grad()
def estimate_loss():
    model.eval()
    x, y = get_batch()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    model.train()
    return {"val": loss}

X, Y = get_batch()
while True:
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + iter_num)
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        if losses["val"] < best_val_loss:
            best_val_loss = torch.tensor(0.5)
        if iter_num > 0:
            checkpoint = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "model_args": model_args,
                "iter_num": iter_num,
                "best_val_loss": best_val_loss,
                "config": config,
                MORE
            }
            torch.save(checkpoint, f"at-{iter_num}.pt")
    if iter_num == 9:
        break
    loss = F.cross_entropy(model(X).flatten(0, 1), Y.flatten())
    X, Y = get_batch()
    loss.backward()
    if iter_num == 7:
        barrier("go")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
finish(model)
"""

ALL = """
import argparse, dataclasses, sys, weakref

@dataclasses.dataclass
class Shape:
    width: int = 8
    bias: bool = True
    name: str = "small"

args = argparse.Namespace(every=4, note=None)
shape = Shape()

class Run:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, shape.width), nn.Dropout(0.1), nn.BatchNorm1d(8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
        self.generator = torch.Generator().manual_seed(5)
        self.losses, self.step, self.epoch = [], 0, 0

    def save(self, path):
        state = {
            "model": self.model.state_dict(),
            "training": {
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "scaler": self.scaler.state_dict(),
                "step": self.step,
                "epoch": self.epoch,
            },
            "args": vars(args),
            "shape": dataclasses.asdict(shape),
            "rng": [torch.get_rng_state(), self.generator.get_state()],
            "losses": self.losses,
            "format": "two",
        }
        torch.save(state, path)

    def train(self, data):
        for self.epoch in range(2):
            for (x,) in torch.utils.data.DataLoader(data, batch_size=4):
                loss = self.model(x).square().mean() + 0 * torch.rand(1, generator=self.generator)
                self.scaler.scale(loss.mean()).backward()
                if self.step == 7:
                    barrier("go")
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.item())
                self.step += 1
                if self.step == 8:
                    seen = weakref.ref(loss)
                assert self.step != 11 or seen() is None    # nothing of a step is kept
                if self.step % args.every == 0:
                    self.save(f"at-{self.step}.pt")

run = Run()
run.train(torch.utils.data.TensorDataset(torch.randn(24, 4)))
assert sys.gettrace() is None
finish(run.model)
"""

SCRIPTS = {"nano": NANO.replace("MORE", ""), "all": ALL}


def same(a, b):
    """Whether two checkpoints hold the same, in the same order; tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def order(probed, script, environ=(), **args):
    """Run a script that stands at a barrier; order a checkpoint there; return job and answer."""
    return probed.ordered(script, ("checkpoint", args), environ=environ)


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_holds_what_the_jobs_own_holds(name, probed, bare):
    """At the same step: weights, moments, schedule, scaler, counters, random state, settings."""
    job, answer = order(probed, SCRIPTS[name])
    assert answer.ok, answer.error
    path = str(job.folder / "at-4.supervise-8.pt")
    assert answer.result == {"path": path, "step": 8, "how": "on-demand"}
    told = [n.data for n in job.notices if n.kind == "checkpoint-saved"]
    assert [(Path(each["path"]).name, each["step"]) for each in told][1:3] == [
        ("at-4.supervise-8.pt", 8),
        ("at-8.pt", 8),
    ]
    ordered = torch.load(path, weights_only=True)
    own = torch.load(job.folder / "at-8.pt", weights_only=True)
    assert same(ordered, own), (ordered, own)
    assert not list(job.folder.glob(".*.supervise*"))

    untouched = bare.run(SCRIPTS[name].replace('barrier("go")', "0"))
    assert job.output == untouched.output
    assert same(own, torch.load(untouched.folder / "at-8.pt", weights_only=True))


def test_under_a_name_of_ones_own(probed, tmp_path):
    path = tmp_path / "mine.pt"
    _, answer = order(probed, SCRIPTS["nano"], path=str(path))
    assert answer.ok and path.exists()
    before = path.read_bytes()
    _, answer = order(probed, SCRIPTS["nano"], path=str(path))
    assert answer.error == f"{path} exists already"
    assert path.read_bytes() == before


EPOCHS = SCRIPTS["all"].replace(
    """                if self.step % args.every == 0:
                    self.save(f"at-{self.step}.pt")
""",
    """            self.save(f"at-{self.step}.pt")
""",
)
ROUNDS = """
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def steps():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def saves():
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "a.pt")

def epoch():
    for _ in range(2):
        steps()

def run(i):
    while i < 12:
        if i == 6:
            barrier("go")
        ROUND

run(0)
"""


def rounds(*lines):
    return ROUNDS.replace("ROUND", "\n        ".join(lines))


REFUSED = {
    "the job saves when its inner loop is over": rounds("epoch()", "i += 1", "saves()"),
    "the job saves and steps in one statement": rounds("i += 1", "steps(), saves()"),
    "was changed since the job started": rounds(
        "if i == 6: open('train.py', 'r+').write('import os')", "i += 1", "saves()", "steps()"
    ),
    "run calls locals()": rounds("i += len(locals()) > 0", "saves()", "steps()"),
    "the job has not saved a checkpoint yet": (NANO.replace("MORE", "").replace("> 0", "> 8")),
    "the 'extra' entry of the job's checkpoints is not known: no variable named 'extra' held the "
    "same when it was saved, nor was that the number of steps": NANO.replace(
        "MORE", '"extra": iter_num * 3'
    ),
    "the job saves outside of the loop that steps": EPOCHS,
    "holds both its weights and its optimizer's state": NANO.replace("MORE", "").replace(
        '"optimizer": optimizer.state_dict(),', ""
    ),
    "the 'model.embed.weight' entry of the job's checkpoints is not known": NANO.replace(
        "MORE", ""
    ).replace("model.state_dict()", "{k: v.clone() for k, v in model.state_dict().items()}"),
    "the newest step was not finite": NANO.replace("MORE", "").replace(
        "    loss.backward()", "    (loss * (float('nan') if iter_num == 7 else 1)).backward()"
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_exact_is_refused(why, probed):
    job, answer = order(probed, REFUSED[why])
    assert not answer.ok and why in answer.error, answer
    assert not list(job.folder.glob("*supervise*"))


COPIES = """
class Counted(torch.nn.Parameter):
    looks = 0

    def data_ptr(self):
        Counted.looks += 1
        return super().data_ptr()

model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
for layer in model:
    layer.weight = Counted(layer.weight.detach())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    looks = Counted.looks
    checkpoint = {
        "model": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
    }
    torch.save(checkpoint, "a.pt")
    emit(looks=Counted.looks - looks)
"""


def test_a_checkpoint_of_copies_costs_a_look_at_each_parameter_thrice(probed):
    """Each was compared with all parameters, at every save: a save of 0.06 s took 3 s."""
    job = probed.run(COPIES)
    looks = [row["looks"] for row in job.output]
    assert 40 <= looks[0] <= 42 and looks == [looks[0]] * 3 + [0] * 2


@pytest.mark.parametrize("leave", ["if i == 7: break", "if i == 7: continue"])
def test_where_the_job_does_not_save_again_before_its_next_step_nothing_is_written(probed, leave):
    """It has left the loop, or passed by the place; nobody waits any more."""
    job, answer = order(probed, rounds("steps()", "i += 1", leave, "saves()"))
    assert answer.ok, answer.error
    (told,) = [n.message for n in job.notices if n.kind == "checkpoint-refused"]
    assert told.startswith("no checkpoint was written: ")
    assert not list(job.folder.glob("*supervise*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_writes_for_all(rank, probed):
    """Where the job itself does so; the others have nothing to do."""
    script = SCRIPTS["nano"]
    if rank:
        script = script.replace("iter_num > 0", "False")
    environ = {"RANK": str(rank), "WORLD_SIZE": "2"}
    job, answer = order(probed, script, environ)
    assert answer.ok, answer.error
    assert len(list(job.folder.glob("*supervise*"))) == 1 - rank

    if rank:
        _, answer = order(probed, SCRIPTS["nano"], environ)
        assert answer.error == "each rank of the job saves a file of its own"
