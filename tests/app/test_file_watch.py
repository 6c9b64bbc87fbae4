"""Files wake who waits for them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from supervise.runtime import FileWatch, Target, checkpoint_targets, watches

pytest.importorskip("watchdog")
WITHIN_S = 20.0


@pytest.fixture
def woken():
    return threading.Event()


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(watches, "RETRY_S", 0.05)
    started = []

    def start(*targets):
        started.append(FileWatch(targets))
        started[-1].start()

    yield start
    for each in started:
        each.close()


def settle(woken):
    """The first call is that of the watch itself, for what came before it."""
    assert woken.wait(WITHIN_S)
    while woken.is_set():
        woken.clear()
        woken.wait(0.1)


@pytest.mark.parametrize("how", ["written", "moved in"])
def test_a_file_that_comes_wakes(tmp_path, watch, woken, how):
    """Written in place, or aside and then moved, as a command or a checkpoint is."""
    watched, aside = tmp_path / "watched", tmp_path / "aside"
    watched.mkdir()
    aside.write_text("x")
    watch(Target(watched, woken.set))
    settle(woken)

    if how == "written":
        (watched / "new").write_text("x")
    else:
        aside.rename(watched / "new")

    assert woken.wait(WITHIN_S)


def test_a_directory_that_comes_later_and_one_below_are_watched(tmp_path, watch, woken):
    """The output directory is made by the job, and each checkpoint in one of its own."""
    out = tmp_path / "out"
    watch(*checkpoint_targets(["out/checkpoint-*/model.pt"], tmp_path, woken.set))
    out.mkdir()
    settle(woken)
    (out / "checkpoint-10").mkdir()
    settle(woken)

    (out / "checkpoint-10" / "model.pt").write_text("x")
    assert woken.wait(WITHIN_S)


@pytest.mark.parametrize(
    ("pattern", "directory"),
    [
        ("out/*.pt", "/job/out"),
        ("out/step-*/model.pt", "/job/out"),
        ("**/*.pt", "/job"),
        ("/data/run/last.pt", "/data/run"),
    ],
)
def test_the_literal_beginning_of_a_pattern_is_watched(pattern, directory, woken):
    (target,) = checkpoint_targets([pattern], Path("/job"), woken.set)

    assert (target.directory, target.below) == (Path(directory), True)
