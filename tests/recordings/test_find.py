"""Which recordings there are below a path, and what they are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervise.errors import InputError
from supervise.recordings import recording_sources


def _make(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("step,loss\n1,2\n")


def _named(*paths):
    return [
        (source.name, source.reader) for source in recording_sources([Path(path) for path in paths])
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

    found = recording_sources([tmp_path, tmp_path / "run-1" / "a.csv"])

    assert [(source.name, source.named) for source in found] == [("a", False)]


def test_a_folder_of_events_is_a_run_and_so_are_those_in_it(tmp_path, event_file):
    pytest.importorskip("tensorboard")
    event_file([("loss", 1, 2.0)], tmp_path / "exp")
    event_file([("loss", 1, 2.0)], tmp_path / "exp" / "eval")
    _make(tmp_path, "exp/config.csv")

    assert _named(tmp_path / "exp") == [("exp", "tensorboard"), ("exp/eval", "tensorboard")]


def test_what_is_not_there_or_holds_nothing_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such file or directory"):
        recording_sources([tmp_path / "none"])
    with pytest.raises(InputError, match="holds no recording") as caught:
        recording_sources([tmp_path])

    assert "Parquet" in str(caught.value.hint)
