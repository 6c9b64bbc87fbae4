"""What a run tells its probe beside the intervals of samples."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from supervise.app.launching import probe_config
from supervise.catalog import load_policy
from supervise.catalog.problems import PolicyErrors

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


def test_a_peak_of_nothing_is_refused(tmp_path):
    """It is what mfu is divided by."""
    with pytest.raises(PolicyErrors, match="peak_flops"):
        load(tmp_path, "job: {peak_flops: 0}\n")


def test_savepoints_for_another_process_are_written_where_a_relaunch_needs_them(tmp_path):
    """A job that cannot resume by itself goes on from one; others pay for none."""
    run = SimpleNamespace(id="r", path=tmp_path, marks_path=Path("m"), quarantine_path=Path("q"))
    kept = {"every": 25, "keep": 3}

    def told(how):
        policy = load(tmp_path, f"job: {{relaunch: {{resume: {how}}}}}\n")
        policy = replace(policy, mode="enforce", savepoints=kept)
        return probe_config(run, tmp_path, policy, ())["savepoints"]

    assert told("savepoint")["portable"] == {
        "every": 100,
        "keep": 2,
        "directory": str(tmp_path / "savepoints"),
    }
    assert "portable" not in told("args")
