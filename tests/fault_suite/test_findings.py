"""What drills show: the first alarm, misattributed alarms, undetected faults; and the reports."""

from __future__ import annotations

import json
import math
import random
from html.parser import HTMLParser

import pytest

from supervise.canary.arms import Arm
from supervise.fault_suite import choice, findings, suite_document
from supervise.fault_suite.fault_arm import Act, Alarm, FaultArm
from supervise.fault_suite.findings import Drill, Runs
from supervise.fault_suite.suite_markdown import markdown
from supervise.fault_suite.suite_page import suite_page

LOSS, ONSET, STEPS = "train_loss_raw", 100, 200
SPIKE, BATCH = Drill("lr_spike:factor=10", "lr_spike"), Drill("bad_batch", "bad_batch")
READS = {"rate": {"learning_rate"}, "loss": {LOSS}, "speed": {"step_time"}}


def arm(seed, change=None, *, alarms=(), acts=(), made=STEPS, refused="", tokens=64.0, code=0):
    """Return a run; `change` is what the fault adds to the loss, by the steps since."""
    rng = random.Random(seed)
    rows = {}
    for step in range(made):
        loss = 2.0 + rng.gauss(0.0, 0.02)
        loss += change(step - ONSET) if change and step >= ONSET else 0.0
        rows[step] = {LOSS: loss, "tokens_per_update": 64.0 if step < ONSET else tokens}
    return FaultArm(
        Arm("a", rows, exit_code=code),
        made=made,
        injected=ONSET if change and not refused else None,
        refused=refused,
        alarms=tuple(Alarm(*one) for one in alarms),
        acts=tuple(Act(verb, step, done=True) for verb, step in acts),
    )


def climbs(after):
    return 0.02 * after


def test_the_lead_is_counted_to_the_loss_leaving_its_band():
    alarms = [("loss", "SEV1", 125), ("rate", "SEV2", 100), ("loss", "SEV0", 126)]
    acting = arm(1, lambda after: 0.0, acts=[("hold_rate", 101)])
    runs = Runs(SPIKE, 1, arm(1, climbs, alarms=alarms), acting, arm(1))

    found = findings.finding(runs, LOSS, STEPS)

    assert [(one.rule, one.delay) for one in found.detections] == [("rate", 0), ("loss", 25)]
    assert found.first.rule == "rate" and found.page.rule == "loss"
    assert found.lead == found.departed and 4 <= found.departed <= 12
    assert found.harmed and not found.end
    assert found.lost == pytest.approx(sum(map(climbs, range(100))))
    assert found.kept == pytest.approx(0.0)
    assert found.acts == (("hold_rate", 1),)
    assert not found.moved and not found.apart


def test_an_alarm_that_the_control_has_too_is_not_counted():
    control = arm(1, alarms=[("speed", "SEV2", 104), ("loss", "SEV2", 190)])
    alarms = [("speed", "SEV2", 105), ("loss", "SEV2", 110)]

    found = findings.finding(
        Runs(BATCH, 1, arm(1, climbs, alarms=alarms), None, control), LOSS, STEPS
    )

    assert [one.rule for one in found.detections] == ["loss"], "earlier than in the control"


def test_a_fault_that_moves_what_it_must_leave_alone_is_noticed():
    silent = arm(1, lambda after: 0.0, tokens=32.0)

    found = findings.finding(Runs(SPIKE, 1, silent, None, arm(1)), LOSS, STEPS)

    assert found.moved == (("tokens_per_update", 0),)
    assert not found.harmed and found.first is None and found.lead is None


def test_runs_that_end_early_are_harmed_and_runs_that_never_repeat_are_doubted():
    ended = arm(1, lambda after: 0.0, made=150, code=1)
    found = findings.finding(Runs(SPIKE, 1, ended, None, arm(2)), LOSS, STEPS)

    assert found.end == "ended after 150 steps with code 1"
    assert found.harmed and found.apart
    never = arm(1, made=50)
    found = findings.finding(Runs(SPIKE, 1, never, None, arm(2)), LOSS, STEPS)
    assert found.refused == "the job ended before the step of the fault"


@pytest.fixture
def document():
    """The document of a suite of two seeds."""
    drills = [SPIKE, BATCH, Drill("router", "router")]
    runs = []
    for seed in (1, 2):
        rate = [("rate", "SEV2", 100), ("loss", "SEV1", 125), ("speed", "SEV2", 103)]
        acting = arm(seed, lambda after: 0.0, acts=[("hold_rate", 100)])
        runs.append(Runs(SPIKE, seed, arm(seed, climbs, alarms=rate), acting, arm(seed)))
        alarms = [("loss", "SEV1", 100)] if seed == 1 else []
        jump = arm(seed, lambda after: 3.0 * (after < 5), alarms=alarms)
        runs.append(Runs(BATCH, seed, jump, None, arm(seed)))
    lacking = arm(1, climbs, refused="no router")
    runs.append(Runs(drills[2], 1, lacking, None, arm(1)))
    found = [findings.finding(one, LOSS, STEPS) for one in runs]
    controls = [
        findings.healthy(1, arm(1, alarms=[("speed", "SEV2", 60)]), LOSS, STEPS),
        findings.healthy(2, arm(2, acts=[("pause", 60)]), LOSS, STEPS),
    ]
    monitors = findings.monitors(drills, found, controls, READS)
    plots = {SPIKE.text: suite_document.plot_of(runs[0], found[0], LOSS)}
    about = {
        "suite": "suite-x",
        "command": ["python", "<train.py>"],
        "policy": {"name": "nano", "digest": "0123456789abcdef", "without": []},
        "metric": LOSS,
        "steps": STEPS,
        "at": ONSET,
        "seeds": [1, 2],
        "notes": [],
        "rules": {},
    }
    return suite_document.suite_document(about, drills, found, controls, monitors, plots)


def test_monitors_are_ranked_by_what_they_are_worth(document):
    ranked = [one["rule"] for one in document["monitors"]]
    rows = {row[0]: row for row in suite_document.monitor_rows(document)}

    assert ranked == ["rate", "loss", "speed"], "false alarms last"
    assert rows["rate"][2].startswith("lr_spike:factor=10 (by ")
    assert rows["loss"][3].endswith("bad_batch (with it)")
    assert rows["speed"][5] == "1"
    (spike, batch, router) = suite_document.fault_rows(document)
    assert spike[1:3] == ("SEV2 rate", "0") and spike[-1] == "hold_rate"
    assert batch[1] == "SEV1 loss (1 of 2 runs)"
    assert router[1] == "not injected: no router"


def test_undetected_faults_and_doubts_are_listed(document):
    (missed,) = suite_document.undetected(document)
    assert missed.startswith("bad_batch: no alarm in 1 of 2 runs; the loss leaves its band and")
    doubts = suite_document.doubts(document)
    assert "the healthy run of seed 2 was acted on: pause" in doubts
    misattributed = "speed has alarms for lr_spike:factor=10, and reads only what these leave alone"
    assert misattributed in doubts
    assert suite_document.summary(document) == (
        "2 faults: 1 harm the run, 1 of these are paged in every run; a monitor leads the loss in "
        "1; 1 have a run without an alarm; 1 alarms in 400 healthy steps"
    )


class Reader(HTMLParser):
    """Checks that elements are closed in their order, and keeps the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "line", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_and_the_tables_hold_it_all(document):
    reader = Reader()
    reader.feed(suite_page(document))

    assert reader.open == []
    for text in ("python <train.py>", "SEV2 rate", "not injected: no router", "no alarm in 1 of 2"):
        assert text in reader.text
    table = markdown(document)
    assert "| lr\\_spike" not in table and "| lr_spike:factor=10 | SEV2 rate | 0 |" in table
    assert "Undetected faults:" in table and "Limits of this suite:" in table
    assert not math.isnan(json.loads(json.dumps(document))["faults"][0]["lost"]["median"])


def test_runs_come_in_waves_with_names_of_their_own():
    first, second, third = choice.waves([SPIKE, BATCH], 2, 3, acts=True)

    assert [one.name for one in first] == ["healthy-1", "healthy-2", "healthy-3"]
    assert [one.name for one in second] == [
        "lr_spike-factor=10-1-unattended",
        "bad_batch-1-unattended",
    ]
    assert len(third) == 6
    left = choice.refusing({BATCH.text: "no"}, third)
    assert {one.drill for one in left} == {SPIKE}
    assert len(choice.waves([SPIKE], 2, 2, acts=False)[2]) == 1
    known = ["bad_batch", "crash", "lr_spike"]
    assert choice.by_default(known) == ["bad_batch", "lr_spike"]
