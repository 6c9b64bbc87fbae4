"""The phase of a schedule from its rates alone, and averages over what is not finite."""

import math

import pytest

RATES = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for rate in {rates}:
    optimizer.param_groups[0]["lr"] = rate
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def changes(job):
    """The phases in their order, each with the step in which it began."""
    found, last = [], None
    for step, now in enumerate(job.column("lr_phase")):
        if now is not None and now != last:
            found.append((step, now))
            last = now
    return found


RISE = [1e-3 * (i + 1) / 20 for i in range(20)]
FLAT = [1e-3] * 100
COSINE = [5e-4 * (1 + math.cos(math.pi * i / 5000)) for i in range(300)]  # of 5000 steps
FALL = [1e-3 * (1 - i / 100) for i in range(1, 100)]
STAIRS = [1e-3 * (i // 8 + 1) / 10 for i in range(80)]

SCHEDULES = {
    "constant": (FLAT, [(16, 1.0)]),
    "warm-up, stable, decay": (RISE + FLAT + FALL, [(1, 0.0), (35, 1.0), (120, 2.0)]),
    "warm-up and a long cosine, flat at its top": (RISE + COSINE[1:], [(1, 0.0), (20, 2.0)]),
    "warm-up by epochs": (STAIRS + FALL, [(8, 0.0), (80, 2.0)]),
    "a first update that was skipped": ([0.0, 0.0, *RISE, *FALL], [(2, 0.0), (22, 2.0)]),
    "a warm-up that begins again": (
        RISE + FLAT + RISE + FLAT,
        [(1, 0.0), (35, 1.0), (120, 2.0), (122, 0.0), (155, 1.0)],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_phase_follows_the_rate(probed, name):
    rates, expected = SCHEDULES[name]
    assert changes(probed.run(RATES.format(rates=rates), slots=512)) == expected


NOT_FINITE = """
nan, inf = math.nan, math.inf
model = nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
for loss, norm in zip([2.0, nan, 2.0, inf, 2.0], [1.0, nan, 3.0, inf, 1.0]):
    model.weight.data.fill_(1.0)
    out = model(torch.ones(1, 1)).sum()
    logits = torch.tensor([[0.0, math.log(math.expm1(loss))]], requires_grad=True)
    loss = F.cross_entropy(logits, torch.zeros(1).long())
    (loss + out * norm - (out * min(norm, 9.0)).detach()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_is_not_finite_enters_no_average(probed):
    """NaN in one step leaves no trace in the next; an overflow is no spike."""
    job = probed.run(NOT_FINITE)
    after = (0.97 * 0.03 * 1.0 + 0.03 * 3.0) / (1 - 0.97**2)
    expected = [None, None, 3.0, None, pytest.approx(1.0 / after)]
    assert [math.isfinite(loss) for loss in job.column("train_loss")] == [True, False] * 2 + [True]
    assert job.column("train_loss_ema") == pytest.approx([2.0] * 5)
    assert job.column("train_ppl") == pytest.approx([math.exp(2)] * 5)
    assert job.column("grad_spike_score") == expected
    assert job.column("overflow_rate") == [None] * 5


LONG = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(340):
    if step == 317:
        barrier("go")
    loss = (model(torch.randn(2, 4)) - 1).square().mean()
    loss.backward()
    total = nn.utils.clip_grad_norm_(model.parameters(), 2.0).item()
    emit(loss=loss.item(), clipped=total > 2.0)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_rate_is_of_its_last_300_steps_and_goes_back_with_the_weights(probed):
    """As does an average, which has no bias at its start."""
    keep = {"every": 12, "keep": 2, "max_bytes": 1 << 20}
    order = ("rollback", {"before_step": 310})
    job, ack = probed.ordered(LONG, order, savepoints=keep, slots=512)
    behind = []
    for step, (frame, row) in enumerate(zip(job.frames, job.output, strict=True)):
        behind.append(row)
        clipped = [each["clipped"] for each in behind[-300:]]
        assert frame["grad_clip_rate"] == pytest.approx(100 * sum(clipped) / len(clipped)), step
        weights = [0.99**age for age in reversed(range(len(behind)))]
        mean = sum(w * each["loss"] for w, each in zip(weights, behind, strict=True)) / sum(weights)
        assert frame["train_loss_ema"] == pytest.approx(mean, rel=1e-5), step
        if step == ack.result["from_step"]:
            del behind[ack.result["step"] + 1 :]
    assert 0 < sum(row["clipped"] for row in job.output) < 340 and len(behind) < 340
