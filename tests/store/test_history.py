"""`supervise export`: all rows of a run, with the time of day of each."""

import csv
import io
import math

import pytest

from supervise.cli import invoke
from supervise.core.model import Announced, Frame, LateFrame, Tick
from supervise.store import Audit, Journal, read_rows

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def recorded(run):
    """Two ranks, names and numbers that came late, and a rollback from step 2 to step 1."""
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
        LateFrame(7, "savepoint", 0, 1, {"dw_spectral_entropy": 0.5}),
        Frame(8, 0, 1, 1, (0.1 + 0.2, 5e-324, None)),
    ):
        journal.append(event)
    journal.close()
    return run


def test_all_rows_of_all_attempts_are_exported_exactly(recorded, tmp_path, capsys):
    assert invoke(["export", "-o", str(tmp_path / "run.csv"), str(recorded.path)]) == 0

    assert "wrote 6 rows" in capsys.readouterr().err
    text = (tmp_path / "run.csv").read_text()
    assert text == (
        "step,rank,attempt,wall,train_loss_raw,learning_rate,loss_scale,dw_spectral_entropy\n"
        "0,0,0,,2.5,0.001,,\n"
        "0,1,0,,2.25,,,\n"
        "1,0,0,,nan,,,\n"
        "2,0,0,,inf,-inf,65536.0,\n"
        "1,0,0,,,,,0.5\n"
        "1,0,1,,0.30000000000000004,5e-324,,\n"
    )
    assert float(list(csv.DictReader(io.StringIO(text)))[-1]["train_loss_raw"]) == 0.1 + 0.2


def test_parquet_holds_the_same_and_its_types(recorded, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert invoke(["export", "-o", str(tmp_path / "run.parquet"), str(recorded.path)]) == 0

    table = parquet.read_table(tmp_path / "run.parquet")
    assert table.num_rows == 6
    types = ["int64", "int32", "int32", "timestamp[ms, tz=UTC]", *["double"] * 4]
    assert [str(field.type) for field in table.schema] == types
    assert table.schema.metadata[b"supervise.run"].decode() == recorded.id
    assert table["loss_scale"].to_pylist() == [None, None, None, 65536.0, None, None]
    assert math.isnan(table["train_loss_raw"].to_pylist()[2])


def test_the_wall_clock_follows_from_the_audit_log(run):
    """A record that was written late does not move it."""
    journal = Journal.open(run.journal_path)
    for event in (
        Announced(1, 0, 1, 77, ("train_loss_raw",)),
        Frame(9_250_000_000, 0, 0, 0, (2.5,)),
        *(Tick(number) for number in range(5)),
        Frame(3600_000_000_000, 0, 0, 1, (2.5,)),
    ):
        journal.append(event)
    journal.close()
    audit = Audit.open(run.audit_path, run.id, at_ns=0, wall="2026-01-05T00:00:00Z")
    for number, at_s, second in ((2, 10, 10), (4, 20, 21), (6, 30, 30)):
        wall = f"2026-01-05T10:00:{second}.500Z"
        body = {"event": number, "reason": "", "data": {}}
        at_ns = at_s * 1_000_000_000
        audit.append("note", actor="engine", at_ns=at_ns, wall=wall, step=0, body=body, sync=False)
    audit.close()

    assert [row.wall.isoformat() for row in read_rows(run)] == [
        "2026-01-05T10:00:09.750000+00:00",
        "2026-01-05T11:00:00.500000+00:00",
    ]
