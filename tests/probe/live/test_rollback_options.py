"""Rollbacks of the weights: what they restore, what goes on, and what a launch is compared with."""

import pytest

LOOP = """
model = nn.Linear(4, 1)
optimizer = torch.optim.{optimizer}
for step in range(30):
    if step == 18:
        barrier("go")
    optimizer.zero_grad()
    ((model(torch.randn(8, 4)) - 1) ** 2).mean().backward()
    optimizer.step()
    emit(step=step, held={held})
"""
ADAM = "AdamW(model.parameters(), lr=0.1)"
KEEP = {"every": 5, "keep": 3, "max_bytes": 1 << 24}


def rolled_back(server, optimizer=ADAM, held="0", **args):
    """Restore the weights of step 10 at step 17 or 18; returns the job and the ack."""
    script = LOOP.format(optimizer=optimizer, held=held)
    return server.ordered(script, ("rollback", {"before_step": 12, **args}), savepoints=KEEP)


def test_moments_are_zero_when_asked(probed):
    """Adam counts from the savepoint, or from nothing."""
    held = "optimizer.state[model.weight]['step'].item()"
    for moments, count in (("zero", 1.0), ("restore", 12.0)):
        job, ack = rolled_back(probed, held=held, moments=moments)
        assert ack.ok, ack.error
        at = ack.result["from_step"]
        assert {row["step"]: row["held"] for row in job.output if "held" in row}[at + 1] == count


def test_moments_that_do_not_start_at_zero_are_refused_before_any_change(probed):
    job, ack = rolled_back(probed, "Rprop(model.parameters())", moments="zero")
    assert not ack.ok and "Rprop holds ['prev', 'step_size']" in ack.error
    assert [frame["step"] for frame in job.frames] == list(range(30))
    assert {frame["attempt"] for frame in job.frames} == {0}


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
    """Of the step right before it; not before a rate times two."""
    order = ("rollback", {"before_step": 17})
    job, ack = probed.ordered(JUMP.format(rate=rate), order, savepoints=KEEP)
    assert ack.ok, ack.error
    assert ack.result["step"] == back
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
    order = ("rollback", {"before_step": 12, "sign": 18})
    job, ack = probed.ordered(script, order, savepoints=KEEP, probe_batch={})
    assert ack.ok, ack.error
    assert ack.result["step"] == back
    rows = [row for row in job.output if "weights" in row]
    assert rows[19]["weights"] == rows[back]["weights"]
    assert back != 16 or rows[19]["moments"] == rows[15]["moments"]


def test_moments_that_somebody_wrote_are_seen_in_a_step_without_a_sample(probed):
    """Bytes are looked at in one step of four, versions in each."""
    script = MOMENTS.format(first="pass", at="== 14", then="state['exp_avg_sq'].mul_(1e-4)")
    order = ("rollback", {"before_step": 12, "sign": 15})
    _, ack = probed.ordered(script, order, savepoints=KEEP, probe_batch={})
    assert (ack.ok, ack.result["step"]) == (True, 13)


THINNED = """
updates = __import__("sys").modules["_supervise_probe"]._probe.parts.wired.updates
updates.relax()
updates.relax()
type(updates.pace).weigh = lambda *costs: None
"""


@pytest.mark.parametrize(
    ("at", "measured"),
    [("== 14", {14, 15, 16}), (">= 0", {3, 5, 6})],  # a habit is no reason
)
def test_an_update_with_moments_that_somebody_wrote_is_measured(probed, at, measured):
    """And the two behind it, where one in four is."""
    script = THINNED + MOMENTS.format(first="pass", at=at, then="state['exp_avg_sq'].mul_(1.0)")
    job, _ = probed.ordered(script, ("savepoint", {}), savepoints=KEEP)
    found = {frame["step"] for frame in job.frames if "update_norm" in frame}
    assert found == measured | set(range(0, 24, 4))


def test_moments_of_the_last_parameter_have_their_turn(probed):
    script = MOMENTS.format(
        first="pass", at="in (14, 15)", then="optimizer.state[model.bias]['exp_avg_sq'].mul_(1e-4)"
    )
    order = ("rollback", {"before_step": 12, "sign": 16})
    script = script.replace("Model(4, 1)", "Model(4, 2)")
    _, ack = probed.ordered(script, order, savepoints=KEEP, probe_batch={})
    assert ack.ok and ack.result["step"] in (13, 14), ack


@pytest.mark.parametrize("sound", [False, True])
def test_where_the_probe_batch_cannot_be_asked_the_loss_of_that_step_counts(probed, sound):
    script = MOMENTS.format(first="pass", at="== 17", then="state['exp_avg_sq'].mul_(1e-4)")
    order = ("rollback", {"before_step": 12, "sign": 18, "sound": sound})
    _, ack = probed.ordered(script, order, savepoints=KEEP)
    assert (ack.ok, ack.result["step"]) == (True, 16 if sound else 10)


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
