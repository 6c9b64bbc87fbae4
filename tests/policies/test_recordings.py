"""What the shipped `nano` policy promises about recorded runs, asked of `supervise backtest`.

The recordings are data only and are not part of the project: `SUPERVISE_DATA` says where they are.
Nothing here names a step or a value of a file: labels and faults say where trouble was.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from typing import Any

import pytest

from ..golden.frozen import DATA, HERE, backtest, recorded

LOGS, FAULTS = DATA / "logs", DATA / "faults"
INJECTED_AT = 800  # in every file of `faults`; some begin one step later
PAGES = ("SEV0", "SEV1")
LEAD, SLACK = 5, 20  # logged rows before and after a label in which an alarm belongs to it

# Kind of trouble -> severities that will do. Other kinds, such as slow steps, are none.
WANTED = {
    "loss_spike_recovered": ("SEV0", "SEV1", "SEV2"),
    "overflow_storm": ("SEV0", "SEV1", "SEV2"),
    "divergence": PAGES,
    "nan": PAGES,
}

# What the loss does not show -> steps within which it must be seen. Damage came after 92 (lr_ramp),
# 101 (overflow), 29 (data_rot) and 337 (qk_grow); three times the learning rate did nearly none.
HIDDEN = {"lr3": 20, "lr_ramp": 92, "overflow": 50, "data_rot": 60, "qk_grow": 300}
# What did no harm: people may be told of it, nothing may be done about it.
HARMLESS = ("adam_reset", "bf16", "bias05", "bias20", "bitflip", "spike_rep", "weightflip_sm")
# Lasting damage, or a batch that was garbage: a page within 10 steps.
HARMFUL = ("adam_v0", "bad_random", "bad_repeat", "label_shuffle", "lr10", "lr30", "weightflip_s0")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not LOGS.is_dir() or not FAULTS.is_dir(),
        reason=f"no recordings at {DATA}: set SUPERVISE_DATA",
    ),
]

Run = dict[str, Any]


def _fault(name: str) -> str:
    """Return `lr3` of `lr3_b3_s0`."""
    return name.rpartition("_s")[0].removesuffix("_b3")


def _labels() -> list[tuple[str, int, int, str]]:
    path = LOGS / "incidents.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [
            (row["run"], int(row["step_start"]), int(row["step_end"]), row["kind"])
            for row in csv.DictReader(file)
            if row["kind"] in WANTED
        ]


FILES = sorted(path.name.removesuffix(".csv.gz") for path in FAULTS.glob("*.csv.gz"))
HEALTHY = [name for name in FILES if name.startswith("healthy")]
FAULTED = [name for name in FILES if not name.startswith("healthy")]


def _spacing(run: Run) -> float:
    spans = [(last - first) for first, last in run["steps"]]
    return max(1.0, sum(spans) / max(1, run["rows"] - len(spans)))


def _belongs(alarm: Run, label: tuple[str, int, int, str], run: Run) -> bool:
    # A log with holes, such as a chronicle, has no even spacing: what is usual is at most 10.
    row = min(10.0, _spacing(run))
    _, start, end, _ = label
    return bool(start - LEAD * row <= alarm["step"] <= end + SLACK * row)


def _false_pages(runs: Mapping[str, Run]) -> list[str]:
    """Return the pages that belong to no label, as text."""
    found = []
    for name, run in runs.items():
        known = [label for label in _labels() if label[0] == name]
        found += [
            f"{name} step {alarm['step']}: {alarm['reason']}"
            for alarm in run["incidents"]
            if alarm["severity"] in PAGES
            and not any(_belongs(alarm, label, run) for label in known)
        ]
    return found


def _after(run: Run) -> list[Run]:
    return [alarm for alarm in run["incidents"] if alarm["step"] >= INJECTED_AT]


def _twin(fault: str) -> str:
    return "healthy_b3_s0" if "_b3_" in fault else f"healthy_{fault.rpartition('_')[2]}"


def test_every_back_test_is_the_same():
    assert list(recorded()) == (HERE / "recordings.txt").read_text().splitlines()


# ── public logs ───────────────────────────────────────────────────────────────────────────────────


def test_no_healthy_row_of_a_public_log_is_paged():
    runs = backtest(LOGS)

    assert sum(run["rows"] for run in runs.values()) > 10_000
    assert _false_pages(runs) == []


@pytest.mark.parametrize("label", _labels(), ids=lambda label: f"{label[3]}-{label[0]}-{label[1]}")
def test_labelled_trouble_is_raised(label):
    """Spikes that heal are told; divergence and NaN are pages, also after one row of history."""
    run = backtest(LOGS)[label[0]]
    said = [(alarm["step"], alarm["severity"]) for alarm in run["incidents"]]

    enough = [a for a in run["incidents"] if a["severity"] in WANTED[label[3]]]
    assert any(_belongs(alarm, label, run) for alarm in enough), f"only {said}"


def test_notices_on_healthy_logs_are_rare():
    """One per 2500 rows of averaged losses; one per 250 of a single rank's micro-batch."""
    counts: dict[bool, list[int]] = {True: [0, 0], False: [0, 0]}
    labelled = {label[0] for label in _labels()}
    for name, run in backtest(LOGS).items():
        if name in labelled or name.startswith("bigscience"):
            continue
        one_rank = name.startswith("modded_nanogpt") and "llmc" not in name
        opened = [alarm for alarm in run["incidents"] if alarm.get("what", "opened") == "opened"]
        counts[one_rank][0] += len(opened)
        counts[one_rank][1] += run["rows"]

    (averaged, rows), (single, single_rows) = counts[False], counts[True]
    assert rows > 10_000
    assert averaged / rows < 1 / 2500
    assert single / max(1, single_rows) < 1 / 250


# ── faults ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_of_ours_is_left_alone(name):
    """Warmup, decay and all: no page, and at most one notice in 1000 steps."""
    run = backtest(FAULTS)[name]

    assert [alarm for alarm in run["incidents"] if alarm["severity"] in PAGES] == []
    assert len(run["incidents"]) <= run["rows"] / 1000
    assert run["actions"] == []


@pytest.mark.parametrize("name", [name for name in FAULTED if _fault(name) in HIDDEN])
def test_what_the_loss_does_not_show_is_seen(name):
    """An incident after the injection, in time, by a rule that is quiet in the healthy twin."""
    runs = backtest(FAULTS)
    usual = {alarm["rule"] for alarm in runs.get(_twin(name), {"incidents": []})["incidents"]}
    before = [alarm for alarm in runs[name]["incidents"] if alarm["step"] < INJECTED_AT]
    seen = [alarm["step"] for alarm in _after(runs[name]) if alarm["rule"] not in usual]

    assert before == []
    assert seen, "not seen"
    assert seen[0] - INJECTED_AT <= HIDDEN[_fault(name)]


@pytest.mark.parametrize("name", [name for name in FAULTED if name.startswith(HARMLESS)])
def test_what_did_no_harm_is_never_paged(name):
    """A lone gradient spike under clipping, a bias in the attention, a reset optimizer."""
    run = backtest(FAULTS)[name]

    assert [alarm for alarm in run["incidents"] if alarm["severity"] in PAGES] == []
    assert run["actions"] == []


@pytest.mark.parametrize("name", [name for name in FAULTED if name.startswith(HARMFUL)])
def test_what_does_damage_is_paged_within_ten_steps(name):
    pages = [a["step"] for a in _after(backtest(FAULTS)[name]) if a["severity"] in PAGES]

    assert pages
    assert pages[0] - INJECTED_AT <= 10
