"""Each format, written by what usually writes it."""

import gzip
import math
import sys

import pytest

from supervise.errors import InputError
from supervise.recordings import READERS

csv, parquet = READERS["csv"], READERS["parquet"]
tensorboard, wandb = READERS["tensorboard"], READERS["wandb"]

pytestmark = pytest.mark.slow

NAN = float("nan")


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_csv(tmp_path, name):
    """Absent, NaN, infinity, words; a mark of the encoding at the start is no letter."""
    path = tmp_path / name
    opener = gzip.open if name.endswith("gz") else open
    with opener(path, "wt", encoding="utf-8-sig") as file:
        file.write("step,loss,word\n0,2.5,x\n1,,\n\n2,nan,y\n3,inf\n")

    assert csv.claims(path)
    sheet = csv.read(path)
    assert sheet.columns == ("step", "loss", "word")
    assert sheet.rows[:2] == [(0.0, 2.5, "x"), (1.0, None, None)]
    assert math.isnan(sheet.rows[2][1])
    assert sheet.rows[3] == (3.0, math.inf)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"step,loss\n0,1,2\n", ":2: 3 cells under 2 columns"),
        ("a.csv", b"step,loss\n0,\xff\xfe\n", "is no CSV"),
        ("a.csv.gz", b"step,loss\n0,1\n", "cannot be read"),
        ("a.csv.gz", gzip.compress(b"step,loss\n" * 99, mtime=0)[:30], "cannot be read"),
    ],
)
def test_a_broken_csv_is_one_sentence(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        csv.read(path)

    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parquet(tmp_path):
    """Null is absent; a folder called like a partition adds no column."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as writer

    path = tmp_path / "kind=real" / "a.parquet"
    path.parent.mkdir()
    columns = {"step": [1, 2, 3], "loss": [2.5, None, NAN], "word": ["a", None, "b"]}
    writer.write_table(arrow.table(columns), path)

    assert parquet.claims(path)
    sheet = parquet.read(path)
    assert sheet.columns == ("step", "loss", "word")
    assert sheet.rows[:2] == [(1.0, 2.5, "a"), (2.0, None, None)]
    assert math.isnan(sheet.rows[2][1])


def test_tensorboard(event_file):
    """Scalars of a step are a row; a tag that counts samples is left out."""
    pytest.importorskip("tensorboard")
    scalars = [("train/loss", 10, 2.5), ("lr", 10, 0.5), ("lm loss vs samples", 640, 9.0)]
    folder = event_file([*scalars, ("train/loss", 20, NAN)])

    assert tensorboard.claims(folder)
    sheet = tensorboard.read(folder)
    assert sheet.columns == ("step", "train/loss", "lr")
    assert sheet.rows[0] == (10.0, 2.5, 0.5)
    assert sheet.rows[1][0] == 20.0
    assert math.isnan(sheet.rows[1][1])


@pytest.mark.parametrize("content", [b"nothing of the kind, but long enough", b"\x00" * 64])
def test_a_broken_event_file_is_one_sentence(tmp_path, content):
    pytest.importorskip("tensorboard")
    (tmp_path / "events.out.tfevents.1.host").write_bytes(content)
    with pytest.raises(InputError, match="is no event file") as caught:
        tensorboard.read(tmp_path)

    assert "\n" not in str(caught.value)


@pytest.fixture(scope="session")
def offline_file(offline_run):
    """300 rows with names long enough for records that span blocks of 32 KiB."""
    pytest.importorskip("wandb")
    wide = {f"layer.{i}.{'x' * 40}": 1.0 for i in range(20)}
    rows = [{"loss": 2.5 - 0.001 * i, "lr": "nan" if i == 7 else 0.5, **wide} for i in range(300)]
    (path,) = offline_run(rows).rglob("*.wandb")
    assert path.stat().st_size > 5 * 32768
    return path


def test_wandb(offline_file):
    assert wandb.claims(offline_file)
    sheet = wandb.read(offline_file)
    step, loss, lr = (sheet.columns.index(name) for name in ("_step", "loss", "lr"))

    assert [row[step] for row in sheet.rows] == list(map(float, range(300)))
    assert [row[loss] for row in sheet.rows] == [2.5 - 0.001 * i for i in range(300)]
    assert [i for i, row in enumerate(sheet.rows) if row[lr] != row[lr]] == [7]


def test_a_run_that_was_killed_is_read_up_to_there(offline_file, tmp_path):
    """Cut anywhere: the rows before are what they were."""
    data, whole = offline_file.read_bytes(), wandb.read(offline_file)
    at = whole.columns.index("loss")
    counts = []
    for share in (0.3, 0.5, 0.77):
        cut = tmp_path / "cut.wandb"
        cut.write_bytes(data[: int(len(data) * share)])
        rows = wandb.read(cut)
        counts.append(len(rows.rows))
        losses = [row[rows.columns.index("loss")] for row in rows.rows]
        assert losses == [row[at] for row in whole.rows[: counts[-1]]]

    assert 0 < counts[0] < counts[1] < counts[2] < 300


def test_a_broken_offline_run_is_one_sentence(offline_file, tmp_path):
    path = tmp_path / "a.wandb"
    path.write_bytes(b"step,loss\n0,1\n")
    with pytest.raises(InputError, match="is no file of an offline run"):
        wandb.read(path)

    data = bytearray(offline_file.read_bytes())
    data[7 + 6] = 9  # behind the head
    path.write_bytes(data)
    with pytest.raises(InputError, match="is damaged at byte"):
        wandb.read(path)


@pytest.mark.parametrize(
    ("reader", "name", "package"),
    [
        (parquet, "a.parquet", "pyarrow"),
        (wandb, "a.wandb", "wandb.proto.wandb_internal_pb2"),
        (tensorboard, ".", "tensorboard.backend.event_processing.event_file_loader"),
    ],
)
def test_a_missing_package_is_named_with_the_way_to_get_it(
    monkeypatch, tmp_path, reader, name, package
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=f"needs the package '{package.split('.')[0]}'") as caught:
        reader.read(tmp_path / name)

    assert caught.value.hint == "pip install 'supervise-train[backtest]'"
