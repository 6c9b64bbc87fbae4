"""`supervise reference`: recorded runs in, a detector that loads out."""

from __future__ import annotations

import math
import random

import pytest
import yaml

from supervise.catalog import load_policy
from supervise.core.model.events import Announced, Frame, Launched

POLICY = """version: supervise/v1
policy: curve
mode: observe
detectors:
{detector}
rules:
  - {{id: off, when: {name}, sev: SEV2}}
"""


@pytest.fixture
def table(tmp_path):
    """A function that writes a CSV of a falling loss with a little noise, and returns its path."""

    def write(name="run.csv", steps=400, column="loss", offset=0.0, seed=0):
        noise = random.Random(seed)
        path = tmp_path / name
        rows = [
            f"{s},{2 + offset + 3 * math.exp(-s / 80) + noise.gauss(0, 0.02):.6f}"
            for s in range(steps)
        ]
        path.write_text("\n".join([f"step,{column}", *rows]) + "\n")
        return path

    return write


def _pasted(out, tmp_path):
    """Put what was printed into a policy, and return its detector."""
    (name,) = yaml.safe_load(out)
    file = tmp_path / "curve.yaml"
    detector = "".join(f"  {line}\n" for line in out.splitlines())
    file.write_text(POLICY.format(detector=detector, name=name))
    return load_policy(file).detectors[name]


def test_what_is_printed_can_be_pasted(supervise, table, tmp_path):
    """Knots from the first to the last step, on the curve."""
    code, out, err = supervise("reference", table(), "--metric", "train_loss_raw")

    assert (code, err) == (0, "")
    detector = _pasted(out, tmp_path)
    assert (detector.metric, detector.smooth) == ("train_loss_raw", 20)
    assert detector.knots[0][0] == 0 and detector.knots[-1][0] == 399
    assert len(detector.knots) > 20
    for step, level, spread in detector.knots[4:]:
        assert level == pytest.approx(2 + 3 * math.exp(-step / 80), abs=0.05)
        assert 0.0 < spread < 0.05


def test_several_runs_widen_the_spread(supervise, table, tmp_path):
    """By half of the distance between two, which is all that two can tell."""
    one, two = table("a.csv"), table("b.csv", offset=0.4, seed=1)
    _, alone, _ = supervise("reference", one, "--metric", "train_loss_raw", "--every", "50")
    _, both, _ = supervise("reference", one, two, "--metric", "train_loss_raw", "--every", "50")

    assert "One run cannot tell" in alone and "One run cannot tell" not in both
    narrow, wide = _pasted(alone, tmp_path), _pasted(both, tmp_path)
    assert narrow.knots[-1][2] < 0.05
    assert wide.knots[-1][1] == pytest.approx(narrow.knots[-1][1] + 0.2, abs=0.02)
    assert 0.2 < wide.knots[-1][2] < 0.25
    assert [knot[0] for knot in wide.knots][-3:] == [300, 350, 399]


def test_logs_for_what_varies_by_factors(supervise, table, tmp_path):
    """Levels stay in units of the metric."""
    _, out, _ = supervise("reference", table(), "--metric", "train_loss_raw", "--log")
    detector = _pasted(out, tmp_path)

    assert detector.transform == "log"
    assert detector.knots[-1][1] == pytest.approx(2.02, abs=0.05)


def test_a_shared_curve_is_of_fractions(supervise, table, tmp_path):
    """Divided by the final loss; `--total-steps` says how long the training would have been."""
    argv = ("reference", table(), "--metric", "train_loss_raw", "--kind", "collapse")
    detector = _pasted(supervise(*argv)[1], tmp_path)
    assert detector.total_steps == 400
    assert detector.knots[-1][:2] == (1.0, pytest.approx(1.0, abs=0.02))

    detector = _pasted(supervise(*argv, "--total-steps", 500, "--smooth", 30)[1], tmp_path)
    assert (detector.total_steps, detector.smooth) == (500, 30)
    assert detector.knots[-1][0] == 0.8


def test_a_run_directory_without_what_a_rollback_took_back(supervise, recorded, tmp_path):
    """From step 40 on only the second life counts."""
    names = ("train_loss_raw",)
    events = [Launched(1, 7, 0), Announced(2, 0, 1, 7, names)]
    events += [Frame(10 + s, 0, 0, s, (2.0 if s < 40 else 9.0,)) for s in range(80)]
    events += [Frame(100 + s, 0, 1, s, (2.0,)) for s in range(40, 70)]

    code, out, err = supervise("reference", recorded(events).path, "--metric", "train_loss_raw")

    assert (code, err) == (0, "")
    detector = _pasted(out, tmp_path)
    assert detector.knots[-1][0] == 69
    assert {level for _, level, _ in detector.knots} == {2.0}


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--metric", "train_los_raw"], 64, "did you mean 'train_loss_raw'?"),
        (["--metric", "train_loss_raw", "--log", "--kind", "collapse"], 64, "--log is not for"),
        (["--metric", "train_loss_raw", "--total-steps", "9"], 64, "add --kind collapse"),
        (["--metric", "train_loss_raw", "--kind", "collapse", "--align", "0.5", "0.2"], 64, "asc"),
        (["--metric", "train_loss_raw", "--every", "0"], 64, "--every"),
        (["--metric", "train_loss_raw", "--every", "1", "--smooth", "2"], 65, "larger --every"),
        (
            ["--metric", "train_loss_raw", "--kind", "collapse", "--total-steps", "90000"],
            65,
            "--total-steps",
        ),
        ([], 64, "--metric"),
    ],
)
def test_what_cannot_work_is_one_message(supervise, table, argv, code, words):
    """Exit code 64 or 65, nothing on stdout, no traceback."""
    found, out, err = supervise("reference", table(steps=600), *argv)

    assert (found, out) == (code, "")
    assert words in err and "Traceback" not in err


def test_what_cannot_be_read_is_one_message(supervise, table, tmp_path):
    """Not there, too short, never finite, below zero, no table."""
    broken = tmp_path / "broken.csv"
    broken.write_text("step,loss\n0,one\n")
    for path in (tmp_path / "none.csv", table("short.csv", steps=20), broken, tmp_path):
        code, out, err = supervise("reference", path, "--metric", "train_loss_raw")

        assert (code, out) == (65, ""), err
        assert len(err.splitlines()) <= 3
    below = table("below.csv", offset=-10.0)
    code, _, err = supervise("reference", below, "--metric", "train_loss_raw", "--log")
    assert (code, "leave out --log" in err) == (65, True)
    code, _, err = supervise("reference", below, "--metric", "train_loss_raw", "--kind", "collapse")
    assert (code, "cannot be normalised" in err) == (65, True)
