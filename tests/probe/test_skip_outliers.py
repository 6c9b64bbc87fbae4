"""Which batches are outliers, until when their updates are skipped, and which ranks are alike."""

import random
from functools import partial
from types import SimpleNamespace

import pytest

from supervise_probe.safeguards.bad_steps import (
    LEAST,
    LOSS_ON_DEVICE,
    NO_LOSS,
    Limits,
    OutlierRule,
    SkipOutliers,
)
from supervise_probe.torch_state import replicated_parameters

BAD = "the weights are bad: the probe batch has a loss of 3.1, and had 2"


def losses(count=200, level=2.0, slope=0.0, spread=0.02, seed=0):
    noise = random.Random(seed)
    return [level + slope * step + spread * noise.gauss(0, 1) for step in range(count)]


def learned(rows, norm=1.0):
    rule = OutlierRule(Limits())
    for step, loss in enumerate(rows):
        rule.applied(
            step, loss, norm * 1.01 ** (step % 7), usual=not rule.explain_outlier(loss, norm)
        )
    return rule


@pytest.mark.parametrize(
    ("rows", "loss", "norm", "out"),
    [
        (losses(), 2.6, 1.0, True),
        (losses(), 2.28, 1.0, False),  # 14 spreads, and less than 15 %
        (losses(spread=0.2), 2.9, 1.0, False),  # half as much again, and 4.5 spreads
        (losses(spread=0.2), 2.9, 9.0, True),  # and the gradient with it
        (losses(spread=0.2), 2.5, 9.0, False),
        (losses(), 2.01, 99.0, False),  # a gradient alone
        (losses(LEAST - 1), 9.0, 9.0, False),  # too early
        (losses(LEAST), 9.0, 9.0, True),
        (losses(slope=-0.008), 0.9, 1.0, True),  # above where the fall has come to
        (losses(level=-2.0), -1.0, None, True),
        ([*losses(150), 5.0, *losses(60)], 5.2, None, True),  # what was out is no precedent
        ([*losses(150, spread=0.2), 3.1, *losses(60, spread=0.2)], 3.4, None, False),  # usual was
    ],
)
def test_what_is_an_outlier(rows, loss, norm, out):
    assert bool(learned(rows).explain_outlier(loss, norm)) is out


def test_behind_an_outlier_half_as_far_will_do():
    rule = learned(losses(spread=0.2))
    assert not rule.explain_outlier(2.9, 1.0) and rule.explain_outlier(2.9, 1.0, follows=True)
    assert not rule.explain_outlier(2.2, 1.0, follows=True)


def test_a_run_that_goes_back_is_not_compared_with_what_it_had_reached():
    rule = learned(losses(slope=-0.008, spread=0.005))
    early = 2.0 - 0.008 * 100

    assert rule.explain_outlier(early, 1.0)
    rule.forget_rows_after(100)
    assert not rule.explain_outlier(early, 1.0)


class Job:
    """A loop with the safeguard; `doubt` is what the probe batch says."""

    def __init__(self, order=None, ranks=1):
        self.said, self.asked, self.doubt = [], [], ""
        self.position = SimpleNamespace(step=0, world_size=ranks)
        reporter = SimpleNamespace(status_changed=lambda: None, notice=self._notice)
        config = SimpleNamespace(safeguards={"skip_outliers": order or {}})
        context = SimpleNamespace(position=self.position, reporter=reporter, config=config)
        self.loss, self.in_force = SimpleNamespace(total=None), SimpleNamespace(guards={})
        self.guard = SkipOutliers(context, self.in_force, self.loss)
        self.guard.connect(self._ask)

    def _notice(self, kind, message, data):
        self.said.append((kind, message, data))

    def _ask(self, before_step, within):
        self.asked.append((self.position.step, before_step))
        return self.doubt

    def run(self, rows, norm=1.0):
        """Return the steps whose updates were skipped."""
        skipped = []
        for loss in rows:
            self.loss.total = loss
            for _ in range(2):  # two optimizers in one step
                update = SimpleNamespace(skip="", gradient_norm=norm)
                self.guard.skip_if_outlier(update)
                if update.skip == "outlier":
                    skipped.append(self.position.step)
                    assert self.in_force.outlier == 1.0
            self.guard.step_ended()
            self.position.step += 1
        return skipped


def test_a_bad_batch_costs_its_own_step():
    job = Job()
    assert job.run([*losses(100), 4.0, *losses(50), 4.0, *losses(5)]) == [100, 151]
    assert not job.asked
    ((kind, message, data), _) = job.said
    assert kind == "safeguard" and "skipped the update of step 100: the loss is 4" in message
    assert data == {"order": "skip_outliers", "loss": 4.0, "gradient_norm": 1.0}


def test_good_weights_let_it_go_on_to_its_limit():
    job = Job({"max": 6, "per": 100})
    assert job.run([*losses(100), *[4.0] * 9]) == [*range(100, 106)]
    assert job.asked == [(102, 100), (104, 100), (106, 100)]  # never three unasked
    assert job.in_force.guards == {"skip_outliers": False} and job.guard.busy
    assert job.guard.why_not == "6 of 100 updates were skipped"
    job.run(losses(5))
    assert job.guard.why_not  # nothing is left
    job.run(losses(90))
    assert job.guard.why_not == "" and job.in_force.guards == {"skip_outliers": True}


def test_bad_weights_end_it_until_the_loss_is_back():
    job = Job()
    job.doubt = BAD
    assert job.run([*losses(100), *[4.0] * 5]) == [100, 101]
    assert job.said[-1][1].endswith(BAD) and job.said[-1][2]["stopped"].endswith(BAD)
    assert len(job.said) == 3 and job.guard.why_not.endswith(BAD)
    assert job.run([*losses(3), 4.0]) == [108]


def test_a_level_that_stays_becomes_usual():
    job = Job({"max": 4, "per": 1000})
    assert job.run([*losses(150), *losses(150, level=3.0)]) == [150, 151, 152, 153]
    assert not learned(losses(150) + losses(150, level=3.0)).explain_outlier(3.0, None)


@pytest.mark.parametrize(
    ("ranks", "loss", "why"),
    [(2, 2.0, "2 ranks would have to skip"), (1, object(), LOSS_ON_DEVICE), (1, None, NO_LOSS)],
)
def test_what_cannot_be_judged_is_said(ranks, loss, why):
    job = Job(ranks=ranks)
    assert job.run([loss] * 60) == []
    assert job.guard.why_not.startswith(why)
    assert job.in_force.guards == {"skip_outliers": False}


def test_what_is_not_finite_is_left_to_others():
    job = Job()
    assert job.run([*losses(100), float("nan"), float("inf"), 4.0]) == [102]


class DistributedDataParallel:
    """As apex and Megatron have one: no process group of this name, no names that are ignored."""

    def __init__(self, weights, **groups):
        self.module = SimpleNamespace(named_parameters=lambda: weights.items())
        for name, ranks in groups.items():
            setattr(self, name, SimpleNamespace(size=partial(int, ranks)))


@pytest.mark.parametrize(
    ("groups", "copies"), [({}, 1), ({"dp_cp_group": 4}, 1), ({"dp_cp_group": 2}, 0)]
)
def test_a_wrapper_of_another_library_makes_replicas_of_all_ranks_but_those_it_parts(
    groups, copies
):
    weight = SimpleNamespace(numel=lambda: 8)
    wrapper = DistributedDataParallel({"weight": weight}, **groups)
    found = replicated_parameters(SimpleNamespace(modules=[wrapper]), 4)

    assert found == set([id(weight)][:copies])
