"""An evaluation behind the end of a process: who waits for it, and until when it hides time."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from supervise.runtime import FinalVerification


class FakeEvaluator:
    """One whose newest checkpoint is never evaluated in time."""

    current = None
    count = 1

    def __init__(self):
        self.ends = 0
        self.has_time = False
        self.by_reason = {}

    def finish(self):
        self.ends += 1
        self.has_time = True

    def on_relaunch(self):
        self.has_time = False

    def awaits_newest_evaluation(self):
        return self.has_time

    def list_missing_metrics(self):
        return self.by_reason


@pytest.fixture
def evaluator():
    return FakeEvaluator()


@pytest.fixture
def job():
    return SimpleNamespace(
        end_requested=False, preempted="", stopping=False, stopped_by="anna", unavailable={}
    )


@pytest.fixture
def looks():
    """The looks at what an ended process left."""
    return []


@pytest.fixture
def final(evaluator, job, looks):
    checkpoints = SimpleNamespace(evaluator=evaluator, is_verifying_now=False)
    checkpoints.verify_now = lambda **terms: looks.append(terms)
    policy = SimpleNamespace(mode="observe", job=SimpleNamespace(on_crash=None))
    processor = SimpleNamespace(state=SimpleNamespace(job=job), policy=policy)
    return FinalVerification(checkpoints, processor, print)


def test_time_is_told_again_once_an_evaluation_behind_the_end_is_over(final, evaluator):
    """Else a job that is started again behind an exit 0 is never found to hang."""
    before, after = (SimpleNamespace(returncode=0) for _ in range(2))
    assert not final.show_if_under_way(0)
    assert final.evaluate_after_exit(before) and final.show_if_under_way(0)
    evaluator.has_time = False
    assert not final.evaluate_after_exit(before) and not final.show_if_under_way(0)
    assert evaluator.ends == 1
    evaluator.has_time = True
    final.on_relaunch()
    assert not final.show_if_under_way(0) and not evaluator.has_time

    assert final.evaluate_after_exit(after) and final.show_if_under_way(0)
    assert evaluator.ends == 2


@pytest.mark.parametrize("cause", ["end_requested", "preempted", "stopping"])
def test_whoever_asked_for_the_end_waits_for_no_evaluation(final, evaluator, job, cause):
    setattr(job, cause, True)

    assert not final.evaluate_after_exit(SimpleNamespace(returncode=0))
    assert not evaluator.ends and not final.show_if_under_way(0)


@pytest.mark.parametrize(
    ("fields", "waits"),
    [
        ({}, True),
        ({"end_requested": True}, False),
        ({"preempted": "after SIGTERM"}, False),
        ({"stopping": True}, False),
        ({"stopping": True, "stopped_by": "policy"}, True),
    ],
)
def test_whoever_asked_for_the_end_waits_for_no_verification(final, looks, job, fields, waits):
    """Behind a stop by the policy nobody waits, and people are told of what is good."""
    vars(job).update(fields)

    assert final.verify_after_exit(SimpleNamespace(returncode=0)) is waits
    assert looks == ([{"patient": False, "newest": True}] if waits else [])


COMMAND = "supervise checkpoint eval ckpt-2 --run runs/1"


@pytest.mark.parametrize(
    ("late", "line"),
    [
        ([], "1 of 2 checkpoints were evaluated; not verified: ckpt-1"),
        (
            ["ckpt-2"],
            "1 of 3 checkpoints were evaluated; not verified: ckpt-1; the job ended first: ckpt-2; "
            + COMMAND,
        ),
    ],
)
def test_a_command_is_shown_only_for_a_checkpoint_that_it_can_evaluate(
    final, evaluator, capsys, late, line
):
    evaluator.by_reason = {"not verified": ["ckpt-1"]}
    evaluator.by_reason |= {"the job ended first": late} if late else {}
    final.show_unevaluated(Path("runs/1"))

    assert capsys.readouterr().out == f"supervise: {line}\n"
