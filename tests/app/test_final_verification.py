"""An evaluation behind the end of a process: who waits for it, and until when it hides time."""

from types import SimpleNamespace

import pytest

from supervise.runtime import FinalVerification


class FakeEvaluator:
    """One whose newest checkpoint is never evaluated in time."""

    current = None

    def __init__(self):
        self.ends = 0
        self.has_time = False

    def finish(self):
        self.ends += 1
        self.has_time = True

    def on_relaunch(self):
        self.has_time = False

    def is_finishing(self):
        return self.has_time


@pytest.fixture
def evaluator():
    return FakeEvaluator()


@pytest.fixture
def job():
    return SimpleNamespace(end_requested=False, preempted="", stopping=False)


@pytest.fixture
def final(evaluator, job):
    checkpoints = SimpleNamespace(evaluator=evaluator, is_verifying_now=False)
    processor = SimpleNamespace(state=SimpleNamespace(job=job))
    return FinalVerification(checkpoints, processor, print)


def test_time_is_told_again_once_an_evaluation_behind_the_end_is_over(final, evaluator):
    """Else a job that is started again behind an exit 0 is never found to hang."""
    before, after = (SimpleNamespace(returncode=0) for _ in range(2))
    assert not final.show(0)
    assert final.evaluate_after_exit(before) and final.show(0)
    evaluator.has_time = False
    assert not final.evaluate_after_exit(before) and not final.show(0)
    assert evaluator.ends == 1
    evaluator.has_time = True
    final.on_relaunch()
    assert not final.show(0) and not evaluator.has_time

    assert final.evaluate_after_exit(after) and final.show(0)
    assert evaluator.ends == 2


@pytest.mark.parametrize("cause", ["end_requested", "preempted", "stopping"])
def test_whoever_asked_for_the_end_waits_for_no_evaluation(final, evaluator, job, cause):
    setattr(job, cause, True)

    assert not final.evaluate_after_exit(SimpleNamespace(returncode=0))
    assert not evaluator.ends and not final.show(0)
