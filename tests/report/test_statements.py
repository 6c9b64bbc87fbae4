"""The checker of the statements on cards: a false one must be found, a true one not."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def checker(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import cards_judge

    return cards_judge


@pytest.mark.parametrize(
    ("line", "false"),
    [
        ("What   loss 2 → 9 at step 41; lr ×100", ""),
        ("What   loss 2.5 → 9 at step 41", "before"),
        ("What   lr ×25", "ratio"),
        ("What   lr 0.1, 100 times its baseline; loss 2.01 (2 before)", ""),
        ("Cause  lr moved first (40), then loss (41)", ""),
        ("Cause  lr moved first (28), then loss (41)", "onset"),
        ("Cause  an unusual batch", "cause"),
        ("Cause  drill lr_spike at step 40", "cause"),
        ("Did    savepoint of step 39 restored", ""),
        ("Did    savepoint of step 30 restored", "done"),
        ("Cost   the progress of 5 steps lost", ""),
        ("Cost   the progress of 9 steps lost", "cost"),
        ("Proof  loss back in its normal range at step 45", ""),
        ("Proof  loss back in its normal range at step 39", "proof"),
        ("Proof  recovered so far", ""),
        ("Cost   1 update skipped; the weights were lost at step 41", "cost"),
        ("What   loss 9 (before 2, limit 12)", "limit"),
        ("Did    learning rate capped at 0.001", "done"),
        (
            "Proof  the loss did NOT come back into its normal range: 9 at the end, 2 before",
            "value",
        ),
        ("Next   start it again from ckpt-1 of step 39 (/c/1)", ""),
        ("Next   start it again from ckpt-1 of step 42 (/c/1)", "next"),
        ("Next   use no checkpoint that was saved since step 60", "onset"),
        ("Next   mend what the model is given from step 40 on", "advice"),
        ("Did    savepoint of step 39 restored; it was withdrawn", "order"),
        ("Cause  lr ×100 at step 40; what it did is seen from step 41", ""),
        ("Next   watch attention logits", "advice"),
        ("Next   go back to step 30", "contradiction"),
        ("Next   from step 400 on", "step"),
        ("Next   supervise policy shows nano", "next"),
        ("Next   nothing", ""),
    ],
)
def test_a_false_statement_on_a_card_is_found(checker, line, false):
    """The rate was 100 times as high for five updates, and the weights were taken back."""
    from cards_replay import Told

    def rows(loss, rate):
        values = [{"train_loss_raw": loss(n), "learning_rate": rate(n)} for n in range(80)]
        return [checker.Row(n, n, 0, int(n > 44), row) for n, row in enumerate(values)]

    order = {"id": "a", "verb": "rollback", "touches_job": True}
    done = {"action": {"id": "a"}, "result": {"step": 39, "from_step": 44}}
    log = [{"kind": "intent", "data": {"action": order}, "event": 44, "reason": "rollback"}]
    saved = "checkpoint ckpt-1 of step 39 was verified"
    log += [{"kind": "note", "data": {}, "event": 41, "reason": saved}]
    log += [{"kind": "commit", "data": done, "event": 45, "reason": "rollback done"}]
    ours = rows(lambda n: 9.0 if 40 < n < 45 else 2.01, lambda n: 0.1 if 40 <= n < 45 else 1e-3)
    plain = rows(lambda n: 2.0, lambda n: 1e-3)
    truth = checker.Truth(checker.Cell("made_up", "rate:100", 40), ours, plain, log, 0)
    moment = {"step": 79, "attempt": 1, "record": 9}
    about = {"state": "RECOVERED", "title": "Loss spike", "rules": [{"rule": "loss.up"}]}
    about |= {"opened": {**moment, "step": 41}, "closed": moment, "breach_step": 40}
    about |= {"did": {"text": "", "acted": True}, "proof": {"text": ""}}
    told = Told({"inc-1": (about, f"inc-1  SEV1  Loss spike   RECOVERED\n{line}")})

    kinds = {found.kind for found in checker.judge(truth, told) if found.is_false}

    assert kinds == ({false} if false else set())
