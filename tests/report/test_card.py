"""The incident card: one document, and every view of it.

Goldens: `tests/golden/incidents`; `python -m tests.golden.frozen` writes them. Read what changed: a
person who has the card alone must be able to say what happened, why, what was done, and what is
next.
"""

from __future__ import annotations

import json
import re
import shlex
from html.parser import HTMLParser

import jsonschema
import pytest
from msgspec.structs import replace

from supervise.catalog import load_policy
from supervise.cli import invoke
from supervise.core.model import (
    ActionFinished,
    ActionOrder,
    ActionPlanned,
    ActionRef,
    Advice,
    Announced,
    ContextEvent,
    ElseHappened,
    EvalShifted,
    Failure,
    Frame,
    IncidentClosed,
    IncidentOpened,
    IncidentRaised,
    Message,
    NormsStayed,
    NoticeTaken,
    OperatorCommand,
    Questions,
    Rejoined,
    RuleFired,
    SpikeClass,
    Step,
    Verdict,
    decision_record,
    format_reading,
)
from supervise.report import (
    Move,
    Record,
    RunOrigin,
    Tapes,
    add_report_to_message,
    build_incident_report,
    closing_receipt,
    count_outcomes,
    describe_observation,
    describe_run,
    is_closing,
    read_records,
    read_tapes,
    records_of,
    render_files,
    render_full,
    sparkline,
)
from supervise.store import Audit, RunDescription
from tests.golden import frozen, stories
from tests.support.recorded_run import SECOND

ALL_HEADS = ["Cause", "Did", "Cost", "Proof", "Loss"]
POLICIES = frozen.ROOT / "policies"
SCHEMA = json.loads((POLICIES / "incident.schema.json").read_text())
VALID = jsonschema.Draft7Validator(SCHEMA)


@pytest.fixture
def made(keep_run, make_frames, small):
    """A function that makes the report of the last incident of `(losses, ...)`."""

    def make(*losses, **options):
        run = keep_run(make_frames(0, *losses), **options)
        records = read_records(run)
        policy = load_policy(run.policy_path)
        chosen = [r.incident for r in records if r.incident][-1]
        origin = RunOrigin.from_description(describe_run(run), "RUN", "in progress")
        tapes = read_tapes(run, records, chosen)
        report = build_incident_report(records, chosen, origin, {policy.digest: policy}, tapes)
        VALID.validate(json.loads(report.encode()))
        return report, "\n".join(render_full(report)), records

    return make


def verdict(kind):
    """Return the class of a spike with answers."""
    questions = Questions(
        rejoined=Rejoined(answer="no", text="3 above the trend", excursion=True),
        eval_shifted=EvalShifted(answer="unknown", text="no evaluation"),
        norms_stayed=NormsStayed(answer="unknown", text="not measured"),
        else_happened=ElseHappened(answer="no", text="no other event", events=()),
    )
    return Verdict(kind, questions)


ORDERED = ActionRef("inc-1/1/1-x")


def planned(verb, **args):
    """Return the intent of an action on the job."""
    touches = verb != "snapshot"
    about = {"runbook": "restart", "destructive": touches, "touches_job": touches}
    order = ActionOrder(id=ORDERED.id, verb=verb, args=args, **about)
    return ActionPlanned(step=201, reason="", action=order, budget={})


def finished(**result):
    return ActionFinished(reason="done", action=ORDERED, result=result)


def noticed(what, reason="", **details):
    return NoticeTaken(reason=reason, what=what, rank=None, at_step=None, details=details)


def built(*decisions, muted=None):
    """Return the report of an incident with these records behind its opening.

    `muted`: a rule that had fired before, without an incident.
    """
    about = {"severity": "SEV1", "reason": "SEV1 hang", "rule": "hang.stuck", "runbook": ""}
    opened = IncidentOpened(step=199, breach_step=0, band=None, headline="no step", **about)
    head = {"actor": "engine", "incident": "inc-1", "wall": stories.WALL}
    records = [
        Record.decode(decision_record(decision) | head | {"seq": n, "mono_ns": n, "event": n})
        for n, decision in enumerate((opened, *decisions))
    ]
    if muted is not None:
        times = {"seq": -1, "mono_ns": 0, "event": -1}
        records.insert(0, Record.decode(decision_record(muted) | head | {"incident": ""} | times))
    origin = RunOrigin.from_description(RunDescription(), "RUN", "")
    return build_incident_report(records, "inc-1", origin, {})


def fired(rule, severity, **reading):
    """Return a rule that fired, by the reading of its only detector."""
    numbers = {"d": {"code": "BREACH", **reading}}
    about = {"reason": "", "when": "d", "rank": 0, "numbers": numbers}
    return RuleFired(step=199, rule=rule, severity=severity, **about)


def test_a_metric_that_is_missing_for_steps_costs_no_seconds():
    """It is counted in steps; a rule that raised it when no longer muted is part of it."""
    about = {"rule": "frozen.empty", "severity": "SEV1"}
    muted = fired(**about, signal="train_loss_raw", unit="steps", value=120.0)
    report = built(
        IncidentRaised(**about, reason="raised", headline="no step", runbook=""), muted=muted
    )

    assert [rule.rule for rule in report.rules] == ["frozen.empty"]
    assert "without a step" not in report.cost.text


@pytest.mark.parametrize("refused", [False, True])
def test_a_job_that_began_anew_did_not_go_on_from_its_checkpoint(refused):
    notice = noticed("resume-refused" if refused else "resumed")
    report = built(planned("relaunch", step=99), finished(pid=7), notice)

    resumed = "started again from the checkpoint of step 99"
    anew = "started again, NOT from the checkpoint of step 99: it trains from its own start"
    assert report.response.text == (anew if refused else resumed)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"loss": 3.55}, ", worse (test batch: loss 1.96 at step 125, 3.55 at step 201)"),
        ({"loss": 2.0}, ", no damage seen (test batch: loss 1.96 at step 125, 2 at step 201)"),
        ({"loss": 2.0, "was": []}, ", unknown (test batch: loss 2 at step 201)"),
        ({}, ", without a result"),
    ],
)
def test_a_test_of_the_weights_says_how_they_are(result, text):
    was = {"was": [(100, 2.1), (125, 1.96), (150, 3.6)]} if result else {}
    report = built(
        planned("check_weights", before_step=128, within=1.1), finished(**(was | result))
    )

    assert report.response.text.startswith(f"weights tested{text}")


@pytest.mark.parametrize(
    ("evidence", "cause"),
    [({"standstill": "rank 2 waits"}, "rank 2 waits"), ({}, "SignalException: got signal: 15")],
)
def test_a_standstill_explains_what_ends_it(evidence, cause):
    """Our own stop, a timeout of a collective: the rank that stood still is the cause of both."""
    error = {"kind": "exception", "type": "SignalException", "message": "got signal: 15"}
    failure = noticed("failure", "SignalException: got signal: 15", **error)

    assert built(planned("snapshot"), finished(**evidence), failure).cause.text == cause


def test_a_fault_of_the_wiring_is_a_possible_cause_with_its_rule_and_tensors():
    text, rule = "gradients that nothing clears (a, 3 more)", "wiring.uncleared"
    fault = ContextEvent(6, "wiring", text, rule, ("a",))
    known = ElseHappened(answer="yes", text=f"also: {text}", events=(fault,))
    plain = verdict(SpikeClass.UNDECIDED)
    spike = replace(plain, questions=replace(plain.questions, else_happened=known))
    about = {"acted": False, "opened_step": 199, "breach_step": 199, "rules": ()}
    report = built(
        IncidentClosed(reason="closed", severity="SEV2", spike=spike, outcome="cleared", **about)
    )

    said = f"perhaps the job's wiring: {text}, rule {rule} since step 6"
    assert (report.cause.text, report.cause.is_known) == (said, True)
    [candidate] = report.cause.candidates
    assert (candidate.rule, [*candidate.tensors], candidate.step) == (rule, ["a"], 6)


def test_what_a_rank_does_is_no_cause_of_an_end():
    """The processes that its evidence looks at are those of another job, or none."""
    assert stories.report("ended-unseen").cause.text.startswith("unknown")


@pytest.mark.parametrize("side", ["high", "low"])
def test_a_level_that_moved_says_to_which_side(side):
    reading = {"metric": "batch_seq_len_p50", "value": 256.0}
    drift = {"sum": 9.0, "threshold": 8.0, "direction": side}
    report = built(fired("data.lengths", "SEV2", **reading, **drift))

    assert f"256 tokens ({side} for too long)" in "".join(render_full(report))
    (condition,) = report.conditions
    assert (condition.measured, condition.limit) == ((9.0, 8.0) if side == "high" else (-9.0, -8.0))


@pytest.mark.parametrize(("value", "told"), [(1.9e4, 16300), (1.6e4, 16000)])
def test_a_ratio_is_told_by_a_value_beyond_its_limit(value, told):
    """The newest sample may be as high as ever: then by the average that is compared."""
    numbers = {"value": value, "fast": 1.63e4, "ratio": 0.86, "reference": 1.89e4}
    bounds = {"threshold": 0.8, "clear": 0.9}
    report = built(fired("throughput.tokens", "SEV2", metric="tokens_per_sec", **numbers, **bounds))

    assert report.observation.text == f"tokens per sec {told} (before 18900)"


def test_norms_that_vary_beside_a_slow_host_are_no_part_of_what_was_seen():
    about = {"severity": "SEV2", "reason": "SEV2 drift", "rule": "throughput.drift"}
    opened = IncidentOpened(step=199, breach_step=199, band=None, runbook="", headline="", **about)
    slow = fired("throughput.drift", "SEV2", metric="step_time", value=0.4, threshold=0.2)
    steps = dict.fromkeys(("peak_step", "first_step", "earliest_step", "latest_step"), 199)
    norm = Move(metric="update_norm", level=1.0, peak=1.3, ratio=1.3, **steps)

    text = describe_observation(opened, [norm], built(slow).conditions, None)

    assert text == "step time 0.4 s (limit 0.2 s)"


def test_a_norm_without_a_number_is_said_once():
    about = {"severity": "SEV0", "headline": "nan", "reason": "", "rule": "nonfinite.gradient"}
    opened = IncidentOpened(step=199, breach_step=199, band=None, runbook="", **about)
    nonfinite = fired("nonfinite.gradient", "SEV0", nonfinite=["grad_global_norm"])
    steps = dict.fromkeys(("peak_step", "first_step", "earliest_step", "latest_step"), 199)
    norm = Move(metric="grad_global_norm", level=1.0, peak=float("nan"), ratio=None, **steps)

    text = describe_observation(opened, [norm], built(nonfinite).conditions, None)

    assert text == "gradient norm NaN or Inf"


def test_progress_is_lost_where_the_loop_went_on():
    """Its steps are not made again, so they are not called repeated."""
    cost = built(planned("rollback"), finished(step=175)).cost

    assert (cost.steps_lost, cost.steps_repeated) == (26, 0)
    assert cost.text == "the progress of 26 steps lost"


@pytest.mark.parametrize(
    ("story", "text"),
    [
        (
            "one-token",
            "the inputs are one token or sample, first at step 200: share of the commonest",
        ),
        ("repeated", "the same batch again and again, first at step 20"),
    ],
)
def test_what_the_model_was_given_is_the_cause_whatever_moved_first(story, text):
    """A rule about batches that joined the incident explains it; one that reads more does not."""
    report = stories.report(story)

    assert report.rules[0].rule == "loss_spike.jump"
    assert isinstance(report.rules[0], RuleFired)  # a field of the decision is one of the report
    assert report.cause.text.startswith(text) and report.cause.is_known


def test_what_a_rule_cannot_see_is_not_called_what_it_looks_for():
    assert stories.report("blind").title == "Rule throughput.stall cannot be evaluated"


def test_running_statistics_are_explained_by_the_forward_pass_that_broke_them():
    """The update was skipped, and yet it is taken back: no weight was damaged, nor any memory."""
    report = stories.report("statistics")

    assert report.cause.text.startswith(
        "the forward pass of step 200 was NaN or Inf, which running statistics keep, though its "
        "update was skipped"
    )
    assert report.cause.is_known and report.cost.unaided is not None
    assert report.cost.unaided.text.endswith("each later evaluation would have been NaN or Inf")
    assert "find the NaN or Inf in the forward pass of step 200" in report.next.text
    assert "memory" not in report.next.text


def test_updates_of_nothing_are_explained_by_a_rate_of_nearly_nothing():
    report = stories.report("rate-gone")

    assert report.rules[0].rule == "update_scale.small"
    assert report.cause.is_known and report.cause.text.endswith(": no weight changes by it")


def test_running_statistics_are_not_explained_by_a_skip_long_before():
    """Gradients overflowed ten steps before, in the same incident, and broke none."""
    report = stories.report("statistics-later")

    assert report.breach_step == 190
    assert report.cause.text.startswith(
        "the forward pass of step 200 was NaN or Inf, which running statistics keep, though its "
        "update was skipped"
    )
    assert "find the NaN or Inf in the forward pass of step 200" in report.next.text


def test_running_statistics_without_a_cause_on_record_are_dated_by_their_count():
    report = stories.report("statistics-alone")

    assert report.cause.text.startswith(
        "a forward pass by step 201 was NaN or Inf, which running statistics keep"
    )
    assert "skipped" not in report.cause.text


def test_running_statistics_that_stay_broken_cost_evaluations():
    report = stories.report("statistics-watched")

    assert report.cost.text == "each evaluation from step 200 on is NaN or Inf"


def test_a_batch_behind_the_onset_is_no_cause():
    report = stories.report("batch-behind")

    assert any(rule.rule == "data.constant" for rule in report.rules)
    assert "one token" not in report.cause.text


def test_a_skip_that_kept_the_weights_whole_is_what_was_done():
    """Also several, with finite losses between them: nothing is to be taken back."""
    report = stories.report("skipped")
    assert report.response.text == "skipped the updates of steps 100 and 170"
    assert report.cost.text == (
        "2 updates skipped; had the updates not been skipped, the weights would have been lost at "
        "step 100"
    )
    assert report.response.acted and report.proof.rejoined_step == 101
    assert report.cause.text.startswith("a batch without targets, first at step 100: ")
    assert report.diagnosis.kind == "contained numeric fault"
    assert "update norm" not in report.cause.text  # it is 0 for the skip
    assert "no rollback is needed" in report.next.text
    assert report.proof.text.startswith("loss back in its normal range")


def test_the_onset_is_a_change_against_the_noise_and_the_schedule():
    """A hard row four steps earlier and a rate that decays are no part of it; its jump is."""
    report = stories.report("decaying")
    moves = {move.metric: move for move in report.observation.moves}

    assert report.cause.text == (
        "the learning rate went 0.000742 → 0.022 (×30) at step 150; learning rate and update norm "
        "moved first (150), then loss and gradient norm (151)"
    )
    assert [c.kind for c in report.cause.candidates] == ["rate"]
    onset = report.observation.onset
    assert (onset.step, onset.earliest, onset.latest) == (150, 150, 150)
    assert moves["train_loss_raw"].level == pytest.approx(2.9 - 0.002 * 151, rel=0.01)
    assert moves["learning_rate"].level == pytest.approx(0.001 * 0.998**149)
    assert "learning rate ×30" in report.observation.text
    # What follows the loss explains nothing, and what stayed on its course is listed.
    assert [area.area for area in report.cause.unchanged] == ["token statistics"]


def test_what_a_drill_does_to_the_training_explains_no_slow_host():
    """Nor does a rate that decays, as it was meant to."""
    report = stories.report("slow-and-drilled")

    assert "moments" not in report.cause.text and "rate" not in report.cause.text
    assert report.observation.onset.step == 200


@pytest.mark.parametrize(
    ("story", "incident", "status", "proof"),
    [
        ("ended-early", "inc-1", "JOB FINISHED", "recovered so far: 58 good steps of 100; loss b"),
        ("ended-by-signal", "inc-1", "ENDED AS ASKED", "recovered so far: 58 good steps of 100; "),
        ("raised-for-good", "inc-1", "NOT RECOVERED", "the loss did NOT come back into its norm"),
        (
            "slow-then-fault",
            "inc-1",
            "CLEARED",
            "still slow: 400 ms per step at the end (steps 324 to 339), 100 ms before; ",
        ),
        ("slow-then-fault", "inc-2", "CLEARED", "loss back in its normal range at step 500; "),
    ],
)
def test_a_proof_claims_what_the_frames_show(story, incident, status, proof):
    """Of a job that ended in probation, a loss that found another level, and of two families."""
    report = stories.report(story, incident)

    assert (report.status, report.proof.verified) == (status, False)
    assert report.proof.text.startswith(proof)
    rejoined = report.proof.rejoined_step
    assert rejoined is None or rejoined > report.observation.onset.step


def test_a_job_that_trains_on_nan_has_lost_its_steps_though_nothing_was_done():
    """Its end is no recovery, though the loss is a number one step longer than the update."""
    report = stories.report("ended-unanswered")

    assert report.cost.text == "81 steps trained on NaN or Inf from step 199 on"
    assert report.status == "JOB FINISHED, NOT RECOVERED"
    height = "the loss did NOT come back into its normal range: NaN at the end, 2.4 before"
    assert report.proof.text.startswith(height)


def test_a_fault_has_an_incident_of_its_own_beside_a_slow_host():
    slow, fault = (stories.report("slow-then-fault", f"inc-{n}") for n in (1, 2))

    assert (slow.observation.onset.step, fault.observation.onset.step) == (200, 400)
    assert slow.cause.candidates == slow.cause.unchanged == []
    assert [candidate.kind for candidate in fault.cause.candidates] == ["rate"]


def test_a_ratio_has_two_digits_and_the_right_word():
    text = stories.report("vanished").observation.text

    assert text.endswith("step 200; update norm fell to 27 %, gradient norm fell to nearly 0")


SPIKE = (*[2.0 + 0.01 * (i % 5) for i in range(40)], 8.0, 7.0, *[2.0] * 40)


@pytest.mark.parametrize("name", frozen.INCIDENTS)
def test_every_kind_of_incident_reads_well(name):
    report = stories.report(name)
    VALID.validate(json.loads(report.encode()))

    for suffix, content in frozen.views_of_incident(report).items():
        path = frozen.HERE / "incidents" / f"{name}{suffix}"
        assert content.splitlines() == path.read_text().splitlines()


def test_every_shipped_rule_has_a_title():
    """A few words that fit the first line of a card, not an id."""
    files = [file for kind in ("*", "packs/*") for file in POLICIES.glob(f"{kind}.yaml")]
    lines = [line for file in files for line in file.read_text().splitlines()]
    rules = [line for line in lines if line.startswith("  - {id: ")]

    assert len(rules) > 90
    assert [rule for rule in rules if not re.search(r'title: "?([^",]{4,45})', rule)] == []


class _Page(HTMLParser):
    """Collects tags that are not closed, and what a page would fetch or run."""

    VOID = frozenset(("meta", "line", "polyline", "br"))

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.foreign: list[str] = []
        self.said = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        fetched = [
            name for name, _ in attrs if name in ("src", "href", "srcset") or name[:2] == "on"
        ]
        self.foreign += [tag] * (tag in ("script", "link", "iframe", "img", "object")) + fetched
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.said += data


def test_the_page_stands_alone():
    """It parses, fetches and runs nothing, and shows all sentences; a job's text is no markup."""
    failure = Failure(message="<img src=x onerror=y>", traceback="<b>")
    report = stories.report("held")
    evil = {"title": f"{report.title} <script>alert(1)</script>", "severity": "<svg onload=z>"}
    report = replace(report, **evil, failures=[failure])
    page = render_files(report)["incident.html"]
    parsed = _Page(page)

    assert parsed.open == [] and parsed.foreign == []
    assert "://" not in page and "url(" not in page and "@import" not in page
    for _, text in (*report.sentences, ("Next", report.next.text)):
        assert text in parsed.said
    assert "<script>alert(1)</script>" in parsed.said and "onerror=y" in parsed.said
    assert "<svg onload" not in page
    assert f'aria-label="loss over steps {report.series.steps[0]}' in page


def test_what_a_rollback_undid_is_dashed():
    """Its step numbers go on, so no step of it is made again."""
    page = render_files(stories.report("spike"))["incident.html"]

    assert 'class="line left"' in page and "dashed: undone" in page


def test_a_document_proceeds_with_its_incident():
    """Open, under way, watched, over: each record moves it on, and nothing is claimed early."""
    records = stories.played("nan").records
    opened = next(n for n, r in enumerate(records) if r.kind == "incident")
    first = {}
    for until in range(opened + 1, len(records) + 1):
        report = stories.report("nan", until=until)
        first.setdefault(report.status, report)

    assert list(first) == ["OPEN", "ACTING", "WATCHING", "RECOVERED"]
    assert [report.proof.verified for report in first.values()] == [False, False, False, True]
    assert [report.final for report in first.values()] == [False, False, False, True]
    assert first["OPEN"].response.text.startswith("nothing")
    assert "under way" in first["ACTING"].response.text
    assert first["WATCHING"].proof.text.startswith("not yet: ")


DO = Advice(None, (Step("do"),))


def told(kind: str, news: str = "news", why: str = "") -> Message:
    about = {"kind": kind, "directory": "/r", "news": news}
    return Message("r", "inc-1", "SEV1", f"inc-1: {news}", "seen", why, DO, 7, **about)


@pytest.mark.parametrize(
    ("story", "message", "title", "heads"),
    [
        ("approval", told("approval"), "inc-1: NaN or Inf loss: news", ["Loss"]),
        ("shadow", told("updated"), "inc-1: Loss spike: news", ["Loss"]),
        ("shadow", told("opened", why="rule a: b"), "inc-1: Loss spike at step 7", ["Loss"]),
        ("rate", told("action"), "inc-1: Learning rate ran away (drill): news", ALL_HEADS),
        ("spike", told("closed"), "inc-1: Loss spike · RECOVERED", ALL_HEADS),
        ("oom", told("finished", "it ended"), "inc-1: Crash: a GPU ran out of memory", ALL_HEADS),
    ],
)
def test_a_message_has_the_facts_of_the_card(story, message, title, heads):
    """The title in words; what was done, its cost and its proof once something was done."""
    report = stories.report(story)
    full = add_report_to_message(message, report)

    assert full.title.startswith(title)
    assert [name for name, _ in full.card] == heads
    in_words = full.kind in ("opened", "closed")
    assert full.verdict == (report.observation.text if in_words else "seen")
    saved = full.kind in ("closed", "finished") and report.evidence.bundles
    assert full.next.text == ("do; evidence: /r/incidents/inc-1/" if saved else "do")


def test_a_long_series_keeps_its_worst_points_and_its_bound():
    """Ten thousand frames after the opening are as many points as two hundred."""
    tapes = Tapes()
    names = ("train_loss_raw",)
    for step in range(10_100):
        loss = 9.0 if step == 4321 else float("nan") if step == 8765 else 2.0
        tapes.add(Frame(step, 0, 0, step, (loss,)), names, opened=step >= 100)
    series = tapes.select(0).series()
    losses = dict(zip(series.steps, series.signals["train_loss_raw"], strict=True))

    assert len(losses) <= 60 + 200 + 1 and series.opened_at == 60
    assert losses[4321] == 9.0 and losses[8765] != losses[8765]
    assert series.window == [40, series.steps[-1]] and series.stride > 1


def test_a_long_incident_forgets_neither_what_moved_first_nor_how_the_loss_is_now():
    """A point of a thinned tape is the worst of several: it is late for an onset, and high."""
    tapes = Tapes()
    names = ("train_loss_raw",)
    for step in range(2100):
        loss = 2.0 if step < 101 else 3.0 + (step - 101) if step < 104 else 2.0 + step % 4 / 10
        tapes.add(Frame(step, 0, 0, step, (loss,)), names, opened=step >= 100)
    tape = tapes.select(0)
    series = tape.series()
    index = series.steps.index(101)

    assert series.stride > 4
    assert series.steps[index : index + 3] == [101, 102, 103]
    assert tape.newest("train_loss_raw") == [(s, 2.0 + s % 4 / 10) for s in range(2084, 2100)]


@pytest.mark.parametrize(
    ("values", "attempts", "line"),
    [
        ([], [], ""),
        ([2.0, 2.0], [0, 0], "▂▂"),
        ([1.0, None, 8.0, 1.0], [0, 0, 0, 1], "▁█⟲▁"),
        ([1.0, float("nan"), 2.0], [0, 0, 0], "▁!█"),
        ([1.0] * 99 + [2.0], [0] * 100, "▁" * 33 + "█"),
    ],
)
def test_sparks(values, attempts, line):
    """A bar for every few values, `!` where one is not finite, `⟲` where it went back."""
    assert sparkline(values, attempts) == line


def test_the_end_and_the_kind_of_trouble_are_shown(made):
    report, full, records = made(*SPIKE)
    closed = next(r for r in reversed(records) if is_closing(r))

    assert (report.final, report.closed.record) == (True, closed.seq)
    assert report.closed.text in closed.reason and closed.reason in full
    assert report.diagnosis == closed.decision.spike
    spike = verdict("data event")
    lines = list(render_full(replace(report, diagnosis=spike)))
    assert lines[lines.index("diagnosis") + 1 :][:5] == [
        "  data event",
        "  1 the loss came back: no: 3 above the trend",
        "  2 evaluations are above their trend: unknown: no evaluation",
        "  3 the newest norms are normal: unknown: not measured",
        "  4 something else happened that moves a loss: no: no other event",
    ]


def test_two_runbooks_of_an_incident_are_two(made, small, tmp_path):
    policy = small.read_text().replace("steps: [{lr", "steps: [snapshot, {lr")
    books, rest = policy.replace("[calm, hold]", "[calm, calmer, hold]").split("budgets:")
    path = tmp_path / "two.yaml"
    path.write_text(f"{books}  calmer:{books.split('  calm:')[1]}budgets:{rest}")
    report, full, _ = made(*SPIKE[:40], *[8.0] * 100, policy=path)

    assert {action.runbook for action in report.actions} >= {"calm", "calmer"}
    steps = ("0-snapshot", "1-lr_scale", "undo-lr_scale")
    assert [action.id for action in report.actions] == [
        f"inc-1/{n}/{step}" for n in (1, 2) for step in steps
    ]
    assert [check.kind for check in report.verification] == ["started", "failed"] * 2
    assert "undo: lr_scale value" in full
    assert (report.status, report.final) == ("HELD", False)
    assert report.proof.text.startswith("not recovered: calmer did not help")


def test_the_records_of_two_incidents_are_not_mixed(keep_run, make_frames, capsys):
    """A rule that fires in the very event that opens an incident belongs to it, and only to it."""
    run = keep_run(make_frames(0, *SPIKE, *[2.0] * 60, 8.0, *[2.0] * 60))
    records = read_records(run)
    first, second = ({r.seq for r in records_of(records, i)} for i in ("inc-1", "inc-2"))

    assert not first & second
    fired = {
        r.seq for r in records if isinstance(r.decision, RuleFired) and r.decision.rule == "spike"
    }
    assert len(fired & first) == len(fired & second) == 1
    assert invoke(["why", str(run.path)]) == 0
    assert capsys.readouterr().out.count("RECOVERED: Loss out of its limit") == 2


def test_an_action_that_failed_is_not_counted_as_done(made, keep_run, make_frames):
    report, _, records = made(*SPIKE, answer=lambda action: {"error": "the rank is gone"})
    run = keep_run(make_frames(0, *SPIKE), answer=lambda action: {"error": "no"}, name="the other")

    assert report.response.acted is False
    assert "lr scale FAILED: the rank is gone" in report.response.text
    assert report.actions[-1].error == "the rank is gone"
    assert report.cost.text.startswith("nothing: the job was not changed")
    assert count_outcomes(records) == {"failed": 2}
    first, listed, *_ = closing_receipt(run)
    assert "1 incident, no action on the job, 2 failed" in first
    assert listed.startswith(f"  inc-1 {report.severity} {report.status}: ")
    assert listed.endswith(f"; supervise why {shlex.quote(str(run.path))} inc-1")


def test_without_policy_and_frames_it_says_what_is_not_known(keep_run, make_frames):
    """An audit log alone: no title of a rule, no series, and no course of the loss is made up."""
    origin = RunOrigin.from_description(RunDescription(), "RUN", "")
    records = read_records(keep_run(make_frames(0, *SPIKE)))
    report = build_incident_report(records, "inc-1", origin, {})

    VALID.validate(json.loads(report.encode()))
    assert report.title == "Loss out of its limit"
    assert (report.series, report.loss.spark, report.conditions[0].past) == (None, "", None)
    assert report.cause.text.startswith("unknown: ")
    assert json.loads(render_files(report)["incident.json"]) == json.loads(report.encode())


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (
            {"metric": "m", "value": 4.0, "z": 8.25, "threshold": 6.0, "transform": "none"}
            | {"median": 2.0, "scale": 0.25, "steps": [1, 9], "samples": 9},
            "m 4, z 8.25 (limit 6); baseline 2 +- 0.25 over steps 1..9 (9 samples)",
        ),
        (
            {"metric": "m", "value": 4.0, "ratio": 0.85, "threshold": 0.8, "clear": 0.9},
            "m 4, 0.85 times its baseline (limit 0.8, clear 0.9)",
        ),
        ({"values": {"a": "NaN", "b": 1.0}, "nonfinite": ["a"]}, "a NaN, b 1"),
        ({"signal": "step", "value": 130.0, "threshold": 120.0}, "no step for 130 s (limit 120 s)"),
        (
            {"last_breach": {"g": 4}, "within": 5, "match": {}},
            "within 5 steps; breaches so far: g at step 4",
        ),
        (
            {"last_breach": {}, "within": 5, "match": {"steps": {"g": 4, "z": 5}}},
            "last match within 5 steps: g at step 4, z at step 5",
        ),
        ({"metric": "m", "value": 1.0, "threshold": 2.0, "parts": 7}, "m 1 (limit 2), parts 7"),
        (
            {"metric": "m", "value": 0.3, "bound": 0.2, "threshold": 0.15, "last_block": 2.5},
            "m 2.5, at least 0.2 per 1000 steps (limit 0.15)",
        ),
    ],
)
def test_readings_in_words(numbers, words):
    """Whatever the kind: what was measured, the limit, the baseline; unknown keys as they are."""
    assert format_reading(numbers) == words


def test_the_end_of_a_run_says_what_the_probe_took_where_that_is_much(keep_run, make_frames):
    """Nobody is paged for it."""
    for share, said in ((0.31, ["  the probe took 31 % of a step; its parts"]), (0.04, [])):
        run = keep_run(make_frames(0, *[2.0] * 5), name=f"run-{share}", ended=False)
        about = {"actor": "app", "at_ns": 0, "wall": stories.WALL}
        audit = Audit.open(run.audit_path, run.id, at_ns=0, wall=stories.WALL)
        body = {"reason": "", "data": {"exit_code": 0, "probe_share": share}}
        audit.append("run_end", **about, step=4, body=body, sync=False)
        audit.close()

        lines = [line for line in closing_receipt(run) if "the probe took" in line]
        assert [line.partition(":")[0] for line in lines] == said


def test_the_end_of_a_run_says_what_was_wrong_with_the_wiring(keep_run):
    """It is no incident, and the message may be long ago."""
    names = ("train_loss_raw", "learning_rate", "update_to_weight")
    begin = [Announced(0, 0, 1, 1, names)]
    rates = [1e-3] * 100 + [0.0] * 40
    frames = [Frame(n * SECOND, 0, 0, n, (4.0, rate, rate)) for n, rate in enumerate(rates)]
    first, told, *_ = closing_receipt(keep_run(frames, policy="nano", begin=begin))

    assert "no incident" in first
    assert told == "  SEV2 the learning rate is 0 from step 100 on, and the loop goes on"


@pytest.mark.parametrize(
    ("losses", "said"), [([2.0], "no incident, "), ([8.0, 7.0], "1 incident, ")]
)
def test_an_order_of_an_operator_is_no_incident_until_a_rule_joins_it(
    keep_run, make_frames, losses, said
):
    """It is an intervention; the receipt counts it as none."""
    order = OperatorCommand(50 * SECOND, "ada", "lr", {"value": 0.5, "rewarm": 10})
    run = keep_run([*make_frames(0, *SPIKE[:40]), order, *make_frames(40, *losses, *[2.0] * 3)])
    [opened] = [r for r in read_records(run) if isinstance(r.decision, IncidentOpened)]

    assert opened.reason == "SEV2 lr_scale requested by ada"
    assert said in closing_receipt(run)[0]
