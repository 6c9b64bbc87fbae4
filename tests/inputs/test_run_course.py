"""Metrics of the whole course of a run are what a plain computation over all its frames gives."""

import math
import random
from itertools import pairwise
from statistics import correlation, fmean, median

import pytest

from supervise.catalog import load_policy
from supervise.core import initial_state
from supervise.core import step as step_engine
from supervise.core.model import Announced, Beat, Frame
from supervise.runtime import FrameEnricher

MS = 1_000_000


class Course:
    """One rank whose frames have these metrics."""

    def __init__(self, *names, policy=None, world=1):
        self.names, self.at_ns, self.number, self.attempt = names, 10**9, 0, 0
        self.world, self.policy = world, policy
        self.state = None if policy is None else initial_state(policy)
        self.supervised_anew()

    def supervised_anew(self):
        judged = None if self.policy is None else lambda: (self.policy, self.state)
        self.enricher = FrameEnricher(lambda pid, leads: {}, judged=judged)
        (news,) = self.enricher.complete(Announced(5, 0, self.world, 100, self.names))
        self._columns = news.names
        self._judge(news)

    def _judge(self, event):
        if self.policy is not None:
            self.state, _ = step_engine(self.policy, self.state, event)

    def step(self, *values, ms=10.0):
        """Publish the next frame; return what joins it."""
        self.at_ns += int(ms * MS)
        frame = Frame(self.at_ns, 0, self.attempt, self.number, values)
        self.number += 1
        *news, frame = self.enricher.complete(frame)
        for event in news:
            self._columns = event.names
        for event in (*news, frame):
            self._judge(event)
        columns = zip(self._columns, frame.values, strict=True)
        return {n: v for n, v in columns if n not in self.names and v is not None}


@pytest.fixture
def policy_of(tmp_path):
    def load(text):
        path = tmp_path / "p.yaml"
        path.write_text(f"version: supervise/v1\nmode: observe\n{text}", "utf-8")
        return load_policy(path)

    return load


def test_train_time_linearity_is_the_time_that_the_median_step_does_not_explain():
    course, noise = Course("train_loss_raw"), random.Random(1)
    found, times = [], [0.0]
    for number in range(1, 1025):
        times.append(80.0 if number > 600 and number % 20 == 0 else noise.uniform(9.0, 11.0))
        found.append(course.step(2.0, ms=times[-1]).get("train_time_linearity"))

    known = {i + 1: value for i, value in enumerate(found) if value is not None}
    assert len(known) == 7
    newest = max(known)
    steps = times[2 : newest + 1]  # the first has no step before it
    lost = 100.0 * (1.0 - len(steps) * median(steps) / sum(steps))
    assert known[newest] == pytest.approx(lost, rel=1e-3) and lost > 8.0
    assert known[min(known)] < 1.0


def test_what_evaluates_or_saves_is_no_lost_time():
    """Known by its metrics, or by the phase that the rank was seen in meanwhile."""
    course = Course("val_loss", "checkpoint_time")
    for number in range(400):
        ms, values = 10.0, (None, None)
        if number % 50 == 10:
            ms, values = 300.0, (2.0, None)
        elif number % 50 == 20:
            ms, values = 300.0, (None, 0.3)
        elif number % 50 == 30:
            course.enricher.on_beats([Beat(0, course.at_ns, "eval")], [], course.at_ns)
            ms = 300.0
        beside = course.step(*values, ms=ms)
        assert beside.get("train_time_linearity", 0.0) < 1e-6


def test_compute_time_frac_is_the_part_of_the_step_that_is_no_wait():
    names = ("step_time", "forward_time", "backward_time", "optimizer_time")
    course, rows = Course(*names), [(0.1 + i / 100, 0.02, 0.04, 0.01) for i in range(10)]
    found = [course.step(*row).get("compute_time_frac") for row in rows]

    share = sum(sum(row[1:]) for row in rows) / sum(row[0] for row in rows)
    assert found[9] == pytest.approx(100.0 * share)
    device = Course(*names, "gpu_mem_allocated")
    seen = [device.step(*row, 40.0 if i % 10 == 9 else None) for i, row in enumerate(rows * 4)]
    assert not any("compute_time_frac" in beside for beside in seen)


def test_batch_new_share_is_that_of_batches_which_did_not_come_shortly_before():
    noise, course = random.Random(3), Course("batch_fingerprint")
    prints = [float(noise.randrange(60)) for _ in range(200)]
    found = [course.step(value).get("batch_new_share") for value in prints]

    assert found[:31] == [None] * 31
    for step in range(63, 200):
        new = [prints[i] not in prints[i - 32 : i] for i in range(step - 31, step + 1)]
        assert found[step] == 100.0 * sum(new) / 32
    assert course.step(None).get("batch_new_share") is None

    course = Course("batch_fingerprint")
    for value in range(100):
        course.step(float(value))
    course.number, course.attempt = 70, 1
    assert {course.step(float(value))["batch_new_share"] for value in range(70, 120)} == {100.0}


def swing(stds, steps=None):
    """Return the newest layer_swing of these standard deviations of each layer, by sample."""
    course = Course(*(f"layer_weight_std.{layer}" for layer in range(len(stds[0]))))
    course.step(*[None] * len(stds[0]))
    found = []
    for number, row in enumerate(stds):
        course.number = course.number if steps is None else steps[number]
        found.append(course.step(*row).get("layer_swing"))
    return found


def test_layer_swing_is_what_the_layers_have_in_common():
    noise, span = random.Random(2), range(12)
    together = [
        [0.02 * i * math.exp(0.01 * (-1) ** t + 0.002 * t) for i in (1, 2, 3, 4)] for t in span
    ]
    *early, newest = swing(together)
    assert early == [None] * 11

    logs = [[math.log(x) for x in column] for column in zip(*together, strict=True)]
    bends = [[x[t] - 2 * x[t + 1] + x[t + 2] for t in range(10)] for x in logs]
    assert correlation(bends[0], bends[3]) > 0.99
    common = [fmean(column) for column in zip(*bends, strict=True)]
    assert newest == pytest.approx(100.0 * math.sqrt(fmean(x * x for x in common)))
    assert newest == pytest.approx(4.0, rel=0.01)

    apart = [[0.02 * math.exp(noise.gauss(0.0, 0.02)) for _ in range(8)] for _ in span]
    bend = [[0.02 * math.exp(0.3 * (t / 12) ** 3)] * 5 for t in span]
    assert swing(apart)[-1] == swing(bend)[-1] == 0.0
    assert swing([row[:3] for row in together])[-1] is None
    steps = [25 * i + 25 * (i // 2) for i in span]  # more densely now and then, as in an incident
    growth = [[0.02 * i * math.exp(0.002 * step) for i in (1, 2, 3, 4)] for step in steps]
    assert swing(growth, steps)[-1] < 1e-9


def test_slice_val_shift_is_the_way_of_one_set_in_scales_of_its_past():
    names, noise = ("slice_val_loss.a", "slice_val_loss.b", "slice_val_loss.c"), random.Random(3)
    course = Course(*names)
    rows = [[3.0 - 0.02 * t + noise.gauss(0.0, 0.01) for _ in names] for t in range(20)]
    rows.append([rows[-1][0] - 0.02, rows[-1][1] - 0.3, rows[-1][2] - 0.02])  # a leak
    found = []
    for row in rows:
        course.step(None, None, None)
        found.append(course.step(*row).get("slice_val_shift"))

    assert found[:9] == [None] * 9 and max(found[9:20]) < 8.0
    ways = []
    for before, now in pairwise(rows):
        changes = [b - a for a, b in zip(before, now, strict=True)]
        ways.append(changes[1] - median(changes))
    scale = max(1.4826 * median(map(abs, ways[:-1])), 0.002 * rows[-1][1])
    assert found[20] == pytest.approx(abs(ways[-1]) / scale) and found[20] > 8.0
    two = Course(*names[:2])
    assert not any("slice_val_shift" in two.step(*row[:2]) for row in rows)


def test_scaling_law_residual_is_the_mean_above_the_law(policy_of):
    policy = policy_of("job: {scaling_law: {floor: 1.5, scale: 40.0, exponent: 0.3}}\n")
    names = ("train_loss", "tokens_applied", "batch_copies")
    course, found = Course(*names, policy=policy, world=4), {}
    for step in range(1, 400):
        law = 1.5 + 40.0 / (2 * 100 * step) ** 0.3
        beside = course.step(law + (0.1 if step >= 200 else 0.0), 100.0 * step, 2.0)
        if "scaling_law_residual" in beside:
            found[step] = beside["scaling_law_residual"]

    assert max(abs(v) for step, v in found.items() if step < 200) < 1e-9
    assert found[max(found)] == pytest.approx(0.1)
    assert len([step for step in found if step > 200]) == pytest.approx(35, abs=3)
    course.policy = policy_of("job: {scaling_law: {floor: 1.0, scale: 40.0, exponent: 0.3}}\n")
    late = [course.step(law, 40000.0 + 100 * n, 2.0) for n in range(20)]  # another was loaded
    newest = [row["scaling_law_residual"] for row in late if "scaling_law_residual" in row][-1]
    assert newest == pytest.approx(0.5, abs=0.05)


RECIPE = (
    "detectors:\n  off: {{kind: collapse, metric: {}, total_steps: 400, smooth: 10,"
    " knots: [[0.01, 2.0, 0.001], [1, 1, 0.001]]}}\n"
)


@pytest.mark.parametrize("metric", ["train_loss_raw", "val_loss_ema"])
def test_collapse_residual_is_that_of_the_policys_own_detector(policy_of, metric):
    course = Course(metric, policy=policy_of(RECIPE.format(metric)))

    def level(step):
        fraction = (step + 1) / 400
        return 3.0 * (2.0 - (fraction - 0.01) / 0.99)

    for step in range(300):
        beside = course.step(level(step))
    assert beside["collapse_residual"] == pytest.approx(0.0, abs=1e-9)
    course.supervised_anew()  # the watches are those of the run, so that this loses nothing
    for step in range(300, 311):
        beside = course.step(level(step) + 0.3)
    assert beside["collapse_residual"] == pytest.approx(0.1)

    course.number, course.attempt = 300, 1
    course.step(level(300))
    assert course.step(level(301))["collapse_residual"] == pytest.approx(0.0, abs=1e-9)
    assert "collapse_residual" not in Course("train_loss_raw").step(2.0)
