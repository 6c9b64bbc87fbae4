"""Log files that the policy names: what is found in them, through rotation, in bounded memory."""

import csv
import itertools
import os
import time
import tracemalloc
from pathlib import Path

import pytest

from supervise.catalog import failure_classes
from supervise.core.model import LOG_FAILURE, Failure, classify_failure
from supervise.runtime import LogFiles

LINES = Path(__file__).parents[2] / "benchmarks" / "log_lines.tsv"
OOM = "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"


@pytest.fixture
def logs(tmp_path):
    made = LogFiles(["*.log"], tmp_path, failure_classes)
    yield made
    made.close()


LATER = itertools.count(time.monotonic_ns() + 10**12, 10**12)


def found(logs, *, last=False):
    """Return class and text of each line since the last call."""
    return [(line.cls, line.message) for line in logs.poll(next(LATER), last=last)]


def write(path, text, mode="a"):
    with path.open(mode, newline="") as file:
        file.write(text)


def test_what_is_new_is_found_once_and_fit_for_a_screen(logs, tmp_path):
    log = tmp_path / "train.log"
    os.mkfifo(tmp_path / "pipe.log")  # what is no regular file is left alone
    (tmp_path / "folder.log").mkdir()
    write(log, f"old {OOM}\n")
    logs.on_launch()
    assert found(logs) == []
    write(log, f"step 1\n\x1b[31mrank 0: {OOM}\x1b[0m\x07\r\nstep 2\nloss: n")
    assert found(logs) == [("cuda-oom", f"rank 0: {OOM}")]
    write(log, "an\n")
    assert found(logs) == [("not-finite", "loss: nan")]
    assert found(logs) == []
    write(tmp_path / "late.log", "kernel: NVRM: Xid (PCI:0000:3b:00): 79")
    assert found(logs) == []  # the line may go on
    assert [cls for cls, _ in found(logs, last=True)] == ["gpu-hardware"]


def test_a_rotated_file_is_read_to_its_end_and_a_shortened_one_again(logs, tmp_path):
    log = tmp_path / "train.log"
    write(log, "start\n")
    logs.on_launch()
    write(log, "OSError: [Errno 28] No space left on device\n")
    log.rename(tmp_path / "train.log.1")
    write(log, "a new file\n")
    assert found(logs) == [("disk-full", "OSError: [Errno 28] No space left on device")]
    write(log, "Stale file handle\n", "w")
    assert found(logs) == [("file-system", "Stale file handle")]


@pytest.mark.parametrize(
    "line",
    [
        "no CUDA out of memory so far",
        "loss 2.31 lr 1e-3 nan_steps 0",
        "GET /nan HTTP/1.1",
        "epoch 0 best_loss: inf, best val loss: inf, min loss inf",
        "NVRM: Xid (PCI:0000:0a:00): 45, pid=7, name=python, Ch 00000008",
    ],
)
def test_an_innocent_line_is_none(logs, tmp_path, line):
    logs.on_launch()
    write(tmp_path / "train.log", f"{line}\n")
    assert found(logs) == []


def test_lines_of_public_reports_have_the_class_that_people_gave_them():
    """`benchmarks/log_classes.md` has the table; two false ones are known."""
    with LINES.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    failures = (Failure(LOG_FAILURE, message=row["line"]) for row in rows)
    classes = (classify_failure(failure, failure_classes()).cls or "-" for failure in failures)
    told = list(zip((row["class"] for row in rows), classes, strict=True))
    false = [pair for pair in told if pair[0] == "-" and pair[1] != "-"]
    assert false == [("-", "not-finite"), ("-", "disk-full")]
    failures = [pair for pair in told if pair[0] != "-"]
    assert sum(own == found for own, found in failures) >= 0.93 * len(failures)


def test_a_class_is_reported_a_few_times_and_a_flood_is_bounded(logs, tmp_path):
    log = tmp_path / "train.log"
    logs.on_launch()
    line = f"{'step 17 loss 2.3 ' * 6}\n"
    write(log, line * 20_000 + f"{OOM}\n" * 9)
    assert [cls for cls, _ in found(logs, last=True)] == ["cuda-oom"] * 3

    os.truncate(log, log.stat().st_size + (256 << 20))  # a hole: it costs no disk
    write(log, "\nNVRM: Xid 79\n")
    tracemalloc.start()
    assert [cls for cls, _ in found(logs, last=True)][-1:] == ["gpu-hardware"]
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
