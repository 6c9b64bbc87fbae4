import csv
import io
import math

import pytest

from supervise.core.model.events import Announced, Frame, Tick
from supervise.errors import UsageError
from supervise.store import history
from supervise.store.journal import Journal

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def recorded(run):
    """Two ranks, a name that came late, and a rollback from step 2 to step 1."""
    journal = Journal.open(run.journal_path)
    for event in (
        Announced(1, 0, 2, 77, ("train_loss_raw", "learning_rate")),
        Announced(1, 1, 2, 78, ("train_loss_raw",)),
        Frame(2, 0, 0, 0, (2.5, 1e-3)),
        Frame(2, 1, 0, 0, (2.25,)),
        Tick(3),
        Frame(4, 0, 0, 1, (NAN, None)),
        Announced(5, 0, 2, 77, ("train_loss_raw", "learning_rate", "loss_scale")),
        Frame(6, 0, 0, 2, (INF, -INF, 65536.0)),
        Frame(8, 0, 1, 1, (0.1 + 0.2, 5e-324, None)),
    ):
        journal.append(event)
    journal.close()
    return run


def test_all_rows_of_all_attempts_are_exported_exactly(recorded):
    """Absent is empty, NaN is nan; every number reads back as the same float."""
    out = io.StringIO()

    rows = history.export_csv(recorded, out)

    assert rows == 5
    assert out.getvalue() == (
        "step,rank,attempt,train_loss_raw,learning_rate,loss_scale\n"
        "0,0,0,2.5,0.001,\n"
        "0,1,0,2.25,,\n"
        "1,0,0,nan,,\n"
        "2,0,0,inf,-inf,65536.0\n"
        "1,0,1,0.30000000000000004,5e-324,\n"
    )
    last = list(csv.DictReader(io.StringIO(out.getvalue())))[-1]
    assert float(last["train_loss_raw"]) == 0.1 + 0.2


def test_frames_name_their_values(recorded):
    """A value belongs to the names that its rank had announced by then."""
    frames = list(history.frames(recorded))

    assert frames[0] == (0, 0, 0, 2, {"train_loss_raw": 2.5, "learning_rate": 1e-3})
    assert frames[1] == (1, 0, 0, 2, {"train_loss_raw": 2.25})
    assert list(frames[2][4]) == ["train_loss_raw"] and math.isnan(frames[2][4]["train_loss_raw"])
    assert frames[3][4]["loss_scale"] == 65536.0


def test_an_unknown_metric_is_refused_with_what_there_is(recorded, run):
    """Did you mean, and the list; nothing is written."""
    out = io.StringIO()

    with pytest.raises(UsageError, match="no metric 'train_los_raw'") as caught:
        history.export_csv(recorded, out, ["train_los_raw"])

    assert caught.value.hint == (
        "did you mean 'train_loss_raw'? it has: train_loss_raw, learning_rate, loss_scale"
    )
    assert out.getvalue() == ""
