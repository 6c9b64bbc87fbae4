"""What a run tells its probe beside the intervals of samples."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from supervise.catalog import load_policy
from supervise.core.model import Savepoints
from supervise.runtime import probe_config

POLICY = "version: supervise/v1\nsummary: s\nmode: observe\nuse: [nonfinite]\n"


def load(tmp_path, text):
    path = tmp_path / "p.yaml"
    path.write_text(POLICY + text)
    return load_policy(str(path))


@pytest.mark.parametrize(("text", "peak"), [("", None), ("job: {peak_flops: 1.2e14}\n", 1.2e14)])
def test_the_peak_of_a_device_that_no_table_knows_reaches_the_probe(tmp_path, text, peak):
    """For mfu; without it the probe goes by the device's name."""
    run = SimpleNamespace(id="r", marks_path=Path("marks"), quarantine_path=Path("quarantine.json"))

    config = probe_config(run, tmp_path, load(tmp_path, text), ())

    assert config["peak_flops"] == peak


def test_savepoints_have_a_budget_of_memory_and_one_of_disk(tmp_path):
    """Shares of what the machine has, unless the policy says how much; or none go to disk."""
    run = SimpleNamespace(
        id="r", path=tmp_path, marks_path=tmp_path / "m", quarantine_path=Path("q")
    )

    def told(**keys):
        policy = replace(load(tmp_path, ""), mode="enforce", savepoints=Savepoints(25, **keys))
        return probe_config(run, tmp_path, policy, ())["savepoints"]

    shares = told(spill="disk")
    assert 0 < shares["max_bytes"] < psutil.virtual_memory().total
    assert 0 < shares["max_disk_bytes"] < shutil.disk_usage(tmp_path).total
    assert "spill" not in shares  # beside the marks
    assert told(spill="none")["spill"] is None
    written = told(spill="disk", max_bytes=5, max_disk_bytes=7)
    assert (written["max_bytes"], written["max_disk_bytes"]) == (5, 7)


def test_the_probe_batch_is_kept_where_something_may_be_taken_back(tmp_path):
    """Off unless the policy says so, and in modes that only look."""
    run = SimpleNamespace(
        id="r", path=tmp_path, marks_path=tmp_path / "m", quarantine_path=Path("q")
    )

    def told(text, mode):
        policy = replace(load(tmp_path, text), mode=mode)
        return probe_config(run, tmp_path, policy, ())["probe_batch"]

    assert told("job: {probe_batch: true}\n", "enforce") == {}
    assert told("job: {probe_batch: true}\n", "shadow") is None
    assert told("", "enforce") is None
