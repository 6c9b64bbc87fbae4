"""Going back, and then on in another way: past the bad batches, with new moments; and the proof
that what is made again is what was made before."""

import pytest

LOOP = """
model = nn.Linear(4, 1)
optimizer = torch.optim.{optimizer}
step = 0
while step < 30:
    if step == 18 and not os.path.exists("go"):
        barrier("go")
    x = torch.randn(8, 4)
    optimizer.zero_grad()
    ((model(x) - 1) ** 2).mean().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    same = bool((before == model.weight).all())
    emit(step=step, same=same, x=x.sum().item(), held={held})
    step += 1
"""
ADAM = "AdamW(model.parameters(), lr=0.1)"
KEEP = {"every": 5, "keep": 3, "max_bytes": 1 << 24}


def rolled_back(server, optimizer=ADAM, held="0", **args):
    """Go back behind step 10 from step 17 or 18; returns the job, what was told again, the ack."""
    job = server.start(LOOP.format(optimizer=optimizer, held=held), savepoints=KEEP)
    ack = job.order("rollback", before_step=12, **args)
    server.wait(job)
    steps = [row["step"] for row in job.output]
    again = len(steps) - 1 - steps[::-1].index(11)
    return job, {row["step"]: row for row in job.output[again:]}, ack


def continuity(job):
    return [notice.data for notice in job.notices if notice.kind == "continuity"]


def test_the_batches_that_did_the_harm_are_passed_over(probed):
    """The same batches come again; the updates of steps 13 to 15 are dropped, and the frames say
    so. The first step that is made again is as it was, bit for bit."""
    job, again, ack = rolled_back(probed, skip=[13, 15])
    assert ack.ok, ack.error
    first = {row["step"]: row for row in reversed(job.output)}
    assert [step for step, row in again.items() if row["same"]] == [13, 14, 15]
    assert [row["x"] for row in again.values()] == [first[step]["x"] for step in again]
    frames = [frame for frame in job.frames if frame["attempt"] == 1]
    assert [f["step"] for f in frames if f["update_skipped"]] == [13, 14, 15]
    (told,) = continuity(job)
    was = next(f for f in job.frames if f["step"] == 11)
    assert told == {
        "step": 11,
        "fingerprint": "same",
        "loss": dict.fromkeys(("was", "is"), was["train_loss_raw"]),
        "lr": {"was": 0.1, "is": 0.1},
        "ok": True,
    }


def test_moments_begin_anew_when_asked(probed):
    """Behind the first step that is made again Adam has counted one step."""
    held = "optimizer.state[model.weight]['step'].item()"
    _, again, ack = rolled_back(probed, held=held, moments="zero")
    assert ack.ok and again[11]["held"] == 1.0
    _, again, ack = rolled_back(probed, held=held, moments="restore")
    assert ack.ok and again[11]["held"] == 12.0


JUMP = """
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(24):
    if step == 19:
        barrier("go")
    optimizer.param_groups[0]["lr"] = {rate}
    ((model(torch.randn(8, 4)) - 1) ** 2).mean().backward()
    optimizer.step()
    emit(step=step, weights=model.weight.tolist())
"""


@pytest.mark.parametrize(
    ("rate", "back"), [("3.0 if step >= 17 else 0.1", 16), ("0.2 if step >= 17 else 0.1", 15)]
)
def test_the_weights_before_a_jump_of_the_rate_are_kept(probed, rate, back):
    """Of the step right before it, where the loop goes on anyway; not before a rate times two."""
    job = probed.start(JUMP.format(rate=rate), savepoints=KEEP)
    ack = job.order("rollback", before_step=17, rng="keep")
    probed.wait(job)
    assert (ack.ok, ack.result["step"], ack.result["loop"]) == (True, back, "keep")
    weights = [row["weights"] for row in job.output if "weights" in row]
    assert weights[19] == weights[back]


MOMENTS = """
class Model(nn.Linear):
    def forward(self, x):
        return ((super().forward(x) - 1) ** 2).mean()


model = Model(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(24):
    if step == 19:
        barrier("go")
    if step == 17:
        {first}
    model(torch.randn(8, 4)).backward()
    if step {at} and step:
        state = optimizer.state[model.weight]
        {then}
    optimizer.step()
    optimizer.zero_grad()
    moments = optimizer.state[model.weight]["exp_avg_sq"]
    emit(step=step, weights=model.weight.tolist(), moments=moments.tolist())
"""


@pytest.mark.parametrize(
    ("job", "back"),
    [
        ({"then": "state['exp_avg_sq'].mul_(1e-4)"}, 16),
        ({"then": "state['exp_avg_sq'].data.mul_(1e-4)"}, 16),  # which no version shows
        ({"then": "state['exp_avg_sq'] = torch.zeros(1, 4)"}, 10),  # not those that were saved
        (
            {"then": "state['exp_avg_sq'].mul_(1.0)", "at": ">= 0"},
            3,
        ),  # a habit, of which 3 is enough
        ({"first": "model.weight.data.add_(9.0)", "then": "state['exp_avg_sq'].mul_(1e-4)"}, 10),
    ],
    ids=["written", "data", "replaced", "habit", "weights-too"],
)
def test_the_weights_before_moments_that_somebody_wrote_are_kept(probed, job, back):
    """With the moments of the savepoint before; not where the weights were damaged as well."""
    script = MOMENTS.format(**{"first": "pass", "at": "== 17", **job})
    job = probed.start(script, savepoints=KEEP, probe_batch={})
    ack = job.order("rollback", before_step=12, sign=18, rng="keep")
    probed.wait(job)
    assert (ack.ok, ack.result["step"], ack.result["loop"]) == (True, back, "keep")
    rows = [row for row in job.output if "weights" in row]
    assert rows[19]["weights"] == rows[back]["weights"]
    assert back != 16 or rows[19]["moments"] == rows[15]["moments"]


@pytest.mark.parametrize("sound", [False, True])
def test_where_the_probe_batch_cannot_be_asked_the_loss_of_that_step_counts(probed, sound):
    script = MOMENTS.format(first="pass", at="== 17", then="state['exp_avg_sq'].mul_(1e-4)")
    job = probed.start(script, savepoints=KEEP)
    ack = job.order("rollback", before_step=12, sign=18, rng="keep", sound=sound)
    probed.wait(job)
    assert (ack.ok, ack.result["step"]) == (True, 16 if sound else 10)


@pytest.mark.parametrize(
    ("optimizer", "args", "says"),
    [
        (ADAM, {"skip": [5, 3]}, "skip must be the first and the last step, not [5, 3]"),
        (ADAM, {"skip": [13, 15], "rng": "keep"}, "skip needs rng=restore"),
        ("Rprop(model.parameters())", {"moments": "zero"}, "Rprop holds ['prev', 'step_size']"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_changed(probed, optimizer, args, says):
    """In a sentence; the job goes on."""
    job, _, ack = rolled_back(probed, optimizer, **args)
    assert not ack.ok and says in ack.error
    assert [frame["step"] for frame in job.frames] == list(range(30))


def test_a_run_that_does_not_go_on_as_it_was_is_told(probed):
    """A loop that draws from a source nobody can set back."""
    script = LOOP.format(optimizer=ADAM, held="0").replace(
        "torch.randn(8, 4)", "torch.frombuffer(bytearray(os.urandom(128)), dtype=torch.int32)"
    )
    script = script.replace("dtype=torch.int32)", "dtype=torch.int32).reshape(8, 4) / 2**31")
    job = probed.start(script, savepoints=KEEP)
    assert job.order("rollback", before_step=12).ok
    probed.wait(job)
    (told,) = (notice for notice in job.notices if notice.kind == "continuity")
    assert not told.data["ok"] and told.data["fingerprint"] == "other"
    assert "another batch" in told.message


def test_steps_of_a_relaunch_are_skipped_by_number_and_by_batch(probed, tmp_path):
    """Without a tape the number decides; with one, another batch is trained on."""
    script = LOOP.format(optimizer=ADAM, held="0")
    config = {"skip": [[13, 15]], "attempt": 2, "first_step": 10}
    job = probed.straight(script, **config)
    skipped = [f["step"] for f in job.frames if f["update_skipped"]]
    assert skipped == [13, 14, 15] and job.frames[0]["step"] == 10
    same = next(f["batch_fingerprint"] for f in job.frames if f["step"] == 14)
    (tmp_path / "tape.0.json").write_text(
        f"[[13, 0, 7, 1.0, 0.1], [14, 0, {same}, 1.0, 0.1], [15, 0, 9, 1.0, 0.1]]"
    )
    job = probed.straight(script, marks=str(tmp_path), **config)
    assert [f["step"] for f in job.frames if f["update_skipped"]] == [14]


LOADER = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 800

    def __getitem__(self, index):
        torch.manual_seed(index) if {workers} else None
        return torch.randn(4) + index / 800


loader = torch.utils.data.DataLoader(Data(), batch_size=8, shuffle=True, num_workers={workers})
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches, step, losses = iter(loader), 0, []
while step < 30:
    if step == 18 and not os.path.exists("go"):
        barrier("go")
    loss = 0.0
    for micro in range(2) if {workers} else range(1):
        part = (model(next(batches)) - 1).pow(2).mean()
        part.backward()
        loss += part.item()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss)
    step += 1
emit(losses=losses)
finish(model)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_the_same_batches_again(probed, bare, workers):
    """Within an epoch: shuffled, read by workers or in the process with draws of its own."""
    script = LOADER.format(workers=workers)
    job = probed.start(script, savepoints=KEEP)
    ack = job.order("rollback", before_step=12)
    assert ack.ok and ack.result["not_restored"] == []
    probed.wait(job)
    assert job.output == bare.straight(script).output
    assert [told["ok"] for told in continuity(job)] == [True]


def test_a_batch_that_was_written_into_is_not_given_again(probed):
    """It would be another one: going back is refused, before anything is changed."""
    script = LOADER.format(workers=0).replace("next(batches)", "next(batches).mul_(2)")
    job = probed.start(script, savepoints=KEEP)
    ack = job.order("rollback", before_step=12)
    assert not ack.ok and "the job has modified them" in ack.error
    probed.wait(job)
    assert [frame["step"] for frame in job.frames] == list(range(30))


EPOCHS = LOADER.format(workers=0).replace("return 800", "return 112")
EPOCHS = EPOCHS.replace(
    "    loss = 0.0\n",
    """    loss = 0.0
    if step % 14 == 0:
        batches = iter(loader)
""",
)


@pytest.mark.parametrize(
    ("before", "rng", "refused"),
    [(12, "restore", True), (18, "restore", False), (12, "keep", False)],
)
def test_a_pass_that_is_over_is_not_gone_back_into(probed, before, rng, refused):
    """Its batches cannot come again: refused before anything is changed, unless others will do."""
    job = probed.start(EPOCHS, savepoints=KEEP)
    ack = job.order("rollback", before_step=before, rng=rng)
    assert ack.ok is not refused
    assert not refused or "its pass over the data is over" in ack.error
    probed.wait(job)
    if refused:
        assert [frame["step"] for frame in job.frames] == list(range(30))


FOR = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x):
        self.calls += 1
        return self.out(self.norm(x))


model = Net()
average = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 8))
kept, batches = [], [torch.randn(8, 4) for _ in range(30)]


def state():
    tensors = [*model.state_dict().values(), *average.state_dict().values()]
    moments = [v for held in optimizer.state.values() for v in held.values()]
    return [tensor.clone() for tensor in (*tensors, *moments)]


for step, x in enumerate(batches):
    if step == 18 and not os.path.exists("go"):
        barrier("go")
    now = state()
    same = [i for i, old in enumerate(kept) if all(map(torch.equal, now, old))]
    gradient = sum(p.grad.abs().sum().item() for p in model.parameters() if p.grad is not None)
    optimizer.zero_grad(set_to_none=False)
    ((model(x) - 1) ** 2).mean().backward()
    optimizer.step()
    schedule.step()
    average.update_parameters(model)
    kept.append(state())
    rate = optimizer.param_groups[0]["lr"]
    emit(step=step, same=same, gradient=gradient, calls=model.calls, rate=rate)
"""


def test_a_for_loop_goes_on_with_the_weights_of_an_earlier_step(probed):
    """Parameters, buffers, averages and moments are those of the savepoint, bit for bit; gradients
    are gone. The loop, its data and its schedule stay where they are."""
    job = probed.start(FOR, savepoints=KEEP)
    ack = job.order("rollback", before_step=12, rng="keep", rewarm={"start": 0.5, "steps": 4})
    assert ack.ok, ack.error
    probed.wait(job)
    to, at = ack.result["step"], ack.result["from_step"]
    rows = {row["step"]: row for row in job.output}
    assert ack.result["loop"] == "keep" and "a for statement" in ack.result["why_keep"]
    assert list(rows) == list(range(30)) and len(job.output) == 30
    assert rows[at + 1]["same"] == [to, at]  # the step returns into them
    assert rows[at + 1]["gradient"] == 0.0 and rows[at]["gradient"] > 0.0
    assert rows[29]["calls"] == 30 and rows[29]["rate"] == 0.1
    frames = {frame["step"]: frame for frame in job.frames}
    assert [f["step"] for f in job.frames] == list(range(30))
    assert [f["step"] for f in job.frames if f["attempt"] == 1] == list(range(at + 1, 30))
    assert [frames[at + i]["learning_rate"] for i in range(1, 6)] == pytest.approx(
        [0.1 * f for f in (0.5, 0.625, 0.75, 0.875, 1.0)]
    )
    told = [notice for notice in job.notices if notice.kind == "weights-restored"]
    assert [notice.data for notice in told] == [{"attempt": 1, "to": to}]
    assert frames[29]["steps_seen"] == 30 - (at - to)
