"""What a run tells its probe beside the intervals of samples."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from supervise.catalog import load_policy
from supervise.catalog.problems import PolicyErrors
from supervise.cli.run import probe_config

POLICY = "version: supervise/v1\nsummary: s\nmode: observe\nuse: [nonfinite]\n"


def load(tmp_path, text):
    path = tmp_path / "p.yaml"
    path.write_text(POLICY + text)
    return load_policy(str(path))


@pytest.mark.parametrize(("text", "peak"), [("", None), ("job: {peak_flops: 1.2e14}\n", 1.2e14)])
def test_the_peak_of_a_device_that_no_table_knows_reaches_the_probe(tmp_path, text, peak):
    """For mfu; without it the probe goes by the device's name."""
    run = SimpleNamespace(id="r", marks_path=Path("marks"))

    config = probe_config(run, tmp_path, load(tmp_path, text), ())

    assert config["peak_flops"] == peak


def test_a_peak_of_nothing_is_refused(tmp_path):
    """It is what mfu is divided by."""
    with pytest.raises(PolicyErrors, match="peak_flops"):
        load(tmp_path, "job: {peak_flops: 0}\n")
