"""Times of backward and optimizer are those that the script spends in them; so is the probe's own.

Each is held between two clocks of the script: one inside of what is timed, one around it.
"""

import pytest

STEPS = 160
LOOP = """
slept, around = {}, {}

def timed(clock, part, function, *args):
    began = time.monotonic()
    result = function(*args)
    clock[part] = clock.get(part, 0.0) + time.monotonic() - began
    return result

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        timed(slept, "backward", time.sleep, 0.004)
        return gradient

class Lazy(torch.optim.SGD):
    def step(self, closure=None):
        timed(slept, "step", time.sleep, 0.003)
        return super().step(closure)

model = nn.Linear(4, 2)
optimizer = Lazy(model.parameters(), lr=0.1)
for n in range({steps}):
    optimizer.zero_grad()
    for micro in range(1 + n % 2):
        loss = Slow.apply(model(torch.randn(3, 4))).square().mean()
        timed(around, "backward", loss.backward)
    timed(around, "step", optimizer.step)
    emit(inside=slept, around=around)
    slept.clear(), around.clear()
""".replace("{steps}", str(STEPS))
TICK = 1e-6  # both clocks count nanoseconds; a float keeps fewer


@pytest.fixture(scope="module")
def job(probed):
    return probed.run(LOOP, sampling={"share": 100})


@pytest.mark.parametrize("name", ["backward", "step"])
def test_a_part_takes_what_the_script_spends_in_it(job, name):
    """No less than was slept inside, no more than passed around the call; two backwards add up."""
    column = {"backward": "backward_time", "step": "optimizer_time"}[name]
    assert len(job.frames) == STEPS
    for frame, row in zip(job.frames[1:], job.output[1:], strict=True):
        least, most = row["inside"][name], row["around"][name]
        assert least > 0.002
        assert least - TICK <= frame[column] <= most + TICK, frame["step"]
        assert frame[column] < frame["step_time"]
    assert not {"step_time", "backward_time", "optimizer_time"} & job.frames[0].keys()


def test_what_the_probe_costs_is_a_part_of_the_step(job):
    """It is told for some steps, and its share is the mean over those, then exponential."""
    weighed = [frame for frame in job.frames if "probe_self_time" in frame]
    assert STEPS // 8 <= len(weighed) <= STEPS // 2
    before = {frame["step"] + 1: frame.get("step_time") for frame in job.frames}
    assert all(0 < each["probe_self_time"] < before[each["step"]] for each in weighed)

    share, count = 0.0, 0
    for frame in job.frames:
        if frame["step"] >= 16 and "probe_self_time" in frame:
            count = min(count + 1, 20)
            share += (frame["probe_self_time"] / frame["step_time"] - share) / count
        expected = pytest.approx(share, rel=1e-9) if count else None
        assert frame.get("probe_overhead_frac") == expected, frame["step"]
    assert count == 20 and 0 < share < 1
