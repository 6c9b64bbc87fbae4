"""What a table's columns and rows come to mean."""

import math
from pathlib import Path

import pytest

from supervise.errors import InputError
from supervise.recordings import NoStepsError, Table, find_recordings, read_csv, split_into_runs

NAN = float("nan")


def _read(columns, *rows, **extra):
    names = columns.split() if isinstance(columns, str) else columns
    return split_into_runs(Table("t.csv", tuple(names), [*rows], first_line=2), extra)


def _spans(found):
    return [(r.run, r.rows[0][0], r.rows[-1][0], len(r.rows)) for r in found]


def test_what_others_call_our_metrics_is_known():
    """Case, blanks, dashes and a leading `train/` do not matter."""
    columns = ("iteration", "LM loss", "grad-norm", "Train/learning_rate")
    (piece,) = _read(columns, (3.0, 2.5, 1.0, 1e-3))

    assert piece.names == ("train_loss_raw", "grad_global_norm", "learning_rate")
    assert (piece.rows[0][0], piece.rows[0][3]) == (3, (2.5, 1.0, 1e-3))


def test_an_id_of_ours_goes_before_an_alias_and_a_word_of_the_user_before_both():
    """One column per metric; the others are said to be left out."""
    columns = "step loss train_loss_raw nll"
    (plain,) = _read(columns, (0.0, 1.0, 2.0, 3.0))
    (told,) = _read(columns, (0.0, 1.0, 2.0, 3.0), nll="train_loss_raw")

    assert plain.rows[0][3][plain.names.index("train_loss_raw")] == 2.0
    assert told.rows[0][3][told.names.index("train_loss_raw")] == 3.0
    assert told.notes == ["columns left out: loss, train_loss_raw"]


@pytest.mark.parametrize(
    ("columns", "overflows"),
    [
        ("step skipped scale", True),
        ("step skipped", False),
        ("step skipped scale skip_reason", False),
    ],
)
def test_a_skip_under_a_loss_scale_is_an_overflow(columns, overflows):
    (found,) = _read(columns, tuple(range(len(columns.split()))))

    assert ("overflow" in found.names) == overflows


def test_columns_like_ids_pass_and_others_are_said():
    """`my_score` may be a job's own metric, `TFLOPs (max)` is none, a column of words neither."""
    columns = ("step", "loss", "my_score", "TFLOPs (max)", "layer")
    (piece,) = _read(columns, (0.0, 1.0, 2.0, 3.0, "a"))

    assert piece.names == ("train_loss_raw", "my_score")
    assert piece.notes == ["columns left out: TFLOPs (max)", "columns of text left out: layer"]


@pytest.mark.parametrize(
    ("steps", "spans"),
    [
        ([1, 2, 3, 2, 3], [(1, 3, 3), (2, 3, 2)]),
        ([1, 2, 2, 3], [(1, 3, 3)]),
        ([1, 2, 1002], [(1, 1002, 3)]),
        ([1, 2, 1003], [(1, 2, 2), (1003, 1003, 1)]),
        ([100, 200, 1300], [(100, 1300, 3)]),
        ([100, 200, 2201], [(100, 200, 2), (2201, 2201, 1)]),
        ([0, 5000, 10000, 15000], [(0, 15000, 4)]),
        ([0, 2000, 2001, 2002], [(0, 0, 1), (2000, 2002, 3)]),
    ],
)
def test_a_step_that_goes_back_or_jumps_far_begins_another_piece(steps, spans):
    """Far is more than 1000 steps and more than 20 times what is usual in the whole run."""
    found = _read("step loss", *((float(step), 1.0) for step in steps))

    assert [span[1:] for span in _spans(found)] == spans


def test_pieces_that_are_too_short_to_judge_are_said():
    """A table in reverse order is one piece per row; of a restart, what is blind."""
    backwards = _read("step loss", *((400.0 - i, 1.0) for i in range(400)))
    again = _read("step loss", *((float(i % 20), 1.0) for i in range(40)))

    (note,) = backwards[0].notes
    assert note.startswith("cut into 400 pieces, where the step goes back or jumps far; without")
    assert note.endswith(" and 394 more; 400 have fewer than 16 rows, too short to judge")
    assert [len(piece.rows) for piece in again] == [20, 20]
    assert again[0].notes[0].endswith("without a baseline: steps 0 to 15")


@pytest.mark.parametrize("twice", ["loss", "step", "run"])
def test_two_columns_of_one_name_are_refused(twice):
    """Which of them is meant nobody knows; others that are left out anyway may be twice."""
    columns = ("run", "step", "loss", "TFLOPs (max)", "TFLOPs (max)", "")
    row = ("a", 1.0, 2.0, 3.0, 3.0, None)
    assert len(_read(columns, row)) == 1

    with pytest.raises(InputError, match=rf"^t.csv:1: 2 columns are called '{twice}'$"):
        _read((*columns, twice), (*row, 1.0))


def test_values_of_one_step_in_two_rows_are_one_row():
    """Some loggers write the validation loss in a row of its own."""
    (found,) = _read("step loss val_loss", (1.0, 2.0, None), (1.0, None, 3.0), (2.0, 2.0, None))

    assert found.rows == [(1, 0, 0, (2.0, 3.0)), (2, 0, 0, (2.0, None))]


def test_of_a_step_with_two_values_the_newest_counts_and_a_nan_is_kept():
    """And that is said; a row that is the same again is not worth a word."""
    (found,) = _read("step loss", (1.0, 2.0), (1.0, 3.0), (2.0, NAN), (2.0, 2.0))
    (same,) = _read("step loss", (1.0, 2.0), (2.0, NAN), (2.0, NAN))

    assert found.rows[0][3] == (3.0,) and math.isnan(found.rows[1][3][0])
    assert found.notes == ["2 rows repeat the step before with other values: the newest count"]
    assert (len(same.rows), same.notes) == (2, [])


def test_a_log_of_lightning_is_one_piece(tmp_path):
    """As its writer does: the rate, the loss and the evaluation of a step in three rows."""
    columns = ("epoch", "lr-AdamW", "step", "train_loss_epoch", "train_loss_step", "val_loss")
    lines = [",".join(columns)]
    for step in range(0, 40, 2):
        lines += [f",0.001,{step},,,", f"{step // 10},,{step},,2.0,"]
        if step % 10 == 8:
            lines += [f"{step // 10},,{step},,,3.0", f"{step // 10},,{step},2.0,,"]
    path = tmp_path / "metrics.csv"
    path.write_text("\n".join(lines) + "\n")
    (piece,) = split_into_runs(read_csv(path))

    assert [row[0] for row in piece.rows] == list(range(0, 40, 2))
    metrics = dict(zip(piece.names, piece.rows[4][3], strict=True))
    assert metrics["learning_rate"] == 1e-3
    assert (metrics["train_loss_raw"], metrics["val_loss"]) == (2.0, 3.0)
    assert piece.notes == []


def test_a_rollback_is_no_new_piece():
    """The step goes back and the attempt grows; ranks have steps of their own."""
    rows = [(1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 0), (1, 0, 1), (1, 1, 1)]
    (found,) = _read("step rank attempt loss", *((*map(float, row), 2.0) for row in rows))

    assert [row[:3] for row in found.rows] == rows


def test_runs_in_one_table_are_told_apart():
    """`run` names a run; `file` a log that was copied from."""
    rows = [("a", 1.0, 2.0), ("b", 1.0, 2.0), ("a", 2.0, 2.0)]

    assert _spans(_read("run step loss", *rows)) == [("a", 1, 2, 2), ("b", 1, 1, 1)]
    assert _spans(_read("file step loss", *rows)) == [(":a", 1, 2, 2), (":b", 1, 1, 1)]


def test_rows_with_a_step_alone_are_nan_where_there_always_was_a_value():
    """Writers that leave the cell of a NaN empty."""
    (found,) = _read("step loss lr", (1.0, 2.0, 0.1), (2.0, 2.0, None), (3.0, None, None))

    assert found.rows[1][3] == (2.0, None)
    assert math.isnan(found.rows[2][3][0])
    assert found.rows[2][3][1] is None
    assert found.notes == ["1 rows hold a step and nothing else: read as NaN"]


@pytest.mark.parametrize(
    ("columns", "row", "says"),
    [
        ("loss lr", (1.0, 1.0), "t.csv: no column of steps"),
        ("step loss", (1.5, 1.0), "t.csv:2: step 1.5 is not a whole number"),
        ("step loss", ("x", 1.0), "t.csv:2: step 'x' is not a whole number"),
        ("step loss", (1.0, "high"), "t.csv:2: loss 'high' is not a number"),
        ("step rank loss", (1.0, NAN, 2.0), "t.csv:2: rank nan is not a whole number"),
        ("step loss", (None, 1.0), "t.csv: no rows with a step and a metric"),
        ("step", (1.0,), "t.csv: no rows with a step and a metric"),
    ],
)
def test_a_broken_table_is_one_sentence(columns, row, says):
    with pytest.raises(InputError) as caught:
        _read(columns, row)

    assert str(caught.value) == says
    assert isinstance(caught.value, NoStepsError) == ("column of steps" in says)


# ── which recordings there are below a path, and what they are called ─────────────────────────────


def _make(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("step,loss\n1,2\n")


def _named(*paths):
    return [
        (source.name, source.reader) for source in find_recordings([Path(path) for path in paths])
    ]


def test_files_are_called_by_what_tells_them_apart(tmp_path):
    _make(tmp_path, "a/metrics.csv", "b/metrics.csv")

    assert _named(tmp_path / "a/metrics.csv", tmp_path / "b/metrics.csv") == [
        ("a/metrics", "csv"),
        ("b/metrics", "csv"),
    ]


def test_a_collection_with_labels_has_names_of_its_own(tmp_path):
    """The same whether one file is asked for or all; the labels themselves are no recording."""
    _make(tmp_path, "logs/site/one.csv", "logs/two.csv", "logs/incidents.csv", "else/three.csv")

    assert _named(tmp_path / "logs/site/one.csv") == [("site/one", "csv")]
    assert _named(tmp_path) == [("three", "csv"), ("site/one", "csv"), ("two", "csv")]


def test_a_folder_is_searched_once_and_links_are_not_followed(tmp_path):
    _make(tmp_path, "run-1/a.csv", "run-1/notes.txt", ".cache/b.csv")
    (tmp_path / "latest-run").symlink_to(tmp_path / "run-1")

    found = find_recordings([tmp_path, tmp_path / "run-1" / "a.csv"])

    assert [(source.name, source.named) for source in found] == [("a", False)]


def test_a_folder_of_events_is_a_run_and_so_are_those_in_it(tmp_path, event_file):
    pytest.importorskip("tensorboard")
    event_file([("loss", 1, 2.0)], tmp_path / "exp")
    event_file([("loss", 1, 2.0)], tmp_path / "exp" / "eval")
    _make(tmp_path, "exp/config.csv")

    assert _named(tmp_path / "exp") == [("exp", "tensorboard"), ("exp/eval", "tensorboard")]


def test_what_is_not_there_or_holds_nothing_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such file or directory"):
        find_recordings([tmp_path / "none"])
    with pytest.raises(InputError, match="holds no recording") as caught:
        find_recordings([tmp_path])

    assert "Parquet" in str(caught.value.hint)
