"""Files wake who waits for them."""

import threading

import pytest

from supervise.runtime import FileWatch, checkpoint_targets

pytest.importorskip("watchdog")
WITHIN_S = 20.0


@pytest.fixture
def woken():
    return threading.Event()


@pytest.fixture
def watch(tmp_path, woken):
    """A function that watches for the files of a pattern."""
    started = []

    def start(pattern):
        started.append(FileWatch(checkpoint_targets([pattern], tmp_path, woken.set), retry_s=0.05))
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


@pytest.mark.parametrize(
    ("pattern", "folder", "how"),
    [
        ("out/*.pt", "out", "written"),
        ("out/step-*/model.pt", "out", "moved in"),
        ("**/*.pt", ".", "written"),
        ("{}/out/last.pt", "out", "moved in"),
    ],
)
def test_a_file_where_the_literal_beginning_of_a_pattern_leads_wakes(
    tmp_path, watch, woken, pattern, folder, how
):
    """Written in place, or aside and then moved, as a command or a checkpoint is."""
    aside = tmp_path.with_name(f"{tmp_path.name}-aside")
    aside.write_text("x")
    (tmp_path / "out").mkdir()
    watch(pattern.format(tmp_path))
    settle(woken)

    if how == "written":
        (tmp_path / folder / "new").write_text("x")
    else:
        aside.rename(tmp_path / folder / "new")

    assert woken.wait(WITHIN_S)


def test_a_directory_that_comes_later_and_one_below_are_watched(tmp_path, watch, woken):
    """The output directory is made by the job, and each checkpoint in one of its own."""
    out = tmp_path / "out"
    watch("out/checkpoint-*/model.pt")
    out.mkdir()
    settle(woken)
    (out / "checkpoint-10").mkdir()
    settle(woken)

    (out / "checkpoint-10" / "model.pt").write_text("x")
    assert woken.wait(WITHIN_S)
