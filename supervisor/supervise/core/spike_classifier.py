"""Classification of a spike. The loss against its own trend, and four questions with numbers.

1 Did the loss come back into the band that it had? 2 Did the evaluation move? 3 Did the norms stay
where they were? 4 What else happened just then? The answers name a class; what could not be asked
is said and never guessed.

All lengths are frames of one rank. Pure arithmetic on short lists: it runs when an incident opens,
is classified and closes, never on a quiet step. Source: the questions are those of the
Marin 32B retrospective. `diagnosis.py` collects the frames.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from .model.verdicts import (
    NO,
    UNKNOWN,
    YES,
    ContextEvent,
    ElseHappened,
    EvalShifted,
    NormChange,
    NormsStayed,
    Questions,
    Rejoined,
    SpikeClass,
    Verdict,
)
from .trends import Band, median, robust_spread, theil_sen_slope

OWN_RATE = "schedule"  # the kind of a jump of the learning rate that the job itself asked for
GOOD_WEIGHTS = "weights"  # of a test of the weights that spoke for other data
WIRING = "wiring"  # of a fault of how the job is put together


def answer_else_happened(happened: Sequence[ContextEvent]) -> ElseHappened:
    """Question 4: did anything else happen near the onset? The text names the first three."""
    if not happened:
        return ElseHappened(answer=NO, text="no other event is known", events=())
    # What the job did to itself comes first: it explains all the rest. Its wiring is no event.
    order = {OWN_RATE: 0, WIRING: 2}
    explaining = sorted(happened, key=lambda event: order.get(event.kind, 1))[:3]
    texts = [f"{event.text} (step {event.step})" for event in explaining]
    text = "also: " + ", ".join(dict.fromkeys(texts))  # each rank says it
    text += f" and {len(happened) - 3} more" if len(happened) > 3 else ""
    return ElseHappened(answer=YES, text=text, events=tuple(happened))


POST = 50  # frames in a row whose median must lie in the band
RECOVERY = 300  # frames in which a spike may come back: "a few hundred steps"
DEADLINE = RECOVERY + POST
FEW_HIGH = 20  # one of so many losses of a good window may be a hard batch's
WAIT = 20  # frames that will do for a verdict when an incident is over sooner
SMOOTH = 0.9  # of the smoothed loss, which must agree with the raw one; project default
PROBE_SHARE, PROBE_MADS = 0.01, 4.0  # an evaluation has shifted
CLIPPED = "grad_clip_rate"
NORM_RATIO = 1.5  # median after / median before; project default
CLIP_FACTOR, CLIP_POINTS = 2.0, 2.0  # the share of clipped steps may double, and 2 % more

SENTENCES: Mapping[SpikeClass, str] = {  # a class in a message
    SpikeClass.RECOVERABLE: "the loss is back to normal",
    SpikeClass.PLATEAU: "the loss stays higher than before",
    SpikeClass.DATA: "the loss stays higher than before, since an unusual batch",
    SpikeClass.STRUCTURAL: "the loss does not come back",
    SpikeClass.SUSPECT: "the loss is back to normal, its cause may remain",
    SpikeClass.ARTEFACT: "the logged loss is higher, the evaluation is not",
    SpikeClass.EXPECTED: "a planned change explains the loss",
    SpikeClass.NUMERIC: "NaN or Inf in the loss, the gradient or the update",
    SpikeClass.CONTAINED: "NaN or Inf in a step; no weight changed by it",
    SpikeClass.SCHEDULE: "the job raised its own learning rate just before",
    SpikeClass.CUT: "an update has had another number of tokens since just before",
    SpikeClass.UNDECIDED: "the cause is not known",
    SpikeClass.NO_EXCURSION: "the loss was normal throughout",
}
NOT_BACK = {  # where other data, or a test of the weights, explain it
    SpikeClass.DATA: "the loss stays higher than before",
    SpikeClass.UNDECIDED: "the loss is not back so far",
}
OF_SUMS = {
    SpikeClass.RECOVERABLE: "the loss of as many tokens is back to normal",
    SpikeClass.NO_EXCURSION: "the loss of as many tokens was normal throughout",
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that the questions are asked of.

    Attributes:
        after: `(step, loss)` from the onset on, finite; after a rollback those of the new attempt.
        norms: metric -> `(median before, values after)`; shares (`grad_clip_rate`) likewise.
        probes: metric -> `(step, value)` of evaluations, before and after.
        artefact: of the evaluation: `same`, `changed`, or `unknown` when nothing identifies it.
        happened: in [onset - 50, onset + 5].
        peak: largest loss seen, also in an attempt that was left.
        nonfinite: first step at which the loss, the gradient or the update was not finite.
        lasting: the newest frame is not finite either.
        skipped: first and last one of those that were skipped instead; they are none of the former.
        bad_losses: how many of the newest losses in a row are not finite, skipped or not.
        came_back: it was not finite again after the rollback. unseen: steps without a frame.
        planned: an announced event covers the onset, and the loss went the way that was expected.
        exhausted: it came back after the last level of the ladder.
        recurring: why it counts as recurring, "" when it does not.
        about_loss: a rule of the incident judges how large the loss is.
        objective: the loss has descended in this run, or nobody knows.
        is_sum: the loss grew with its tokens; `after` and `peak` are of as many as before.
        rolled_back: `after` is a new attempt. sound: the weights were tested, and good.
    """

    band: Band | None
    after: Sequence[tuple[int, float]] = ()
    norms: Mapping[str, tuple[float, Sequence[float]]] = field(default_factory=dict)
    probes: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    artefact: str = "unknown"
    happened: Sequence[ContextEvent] = ()
    peak: float | None = None
    nonfinite: int | None = None
    lasting: bool = False
    skipped: Sequence[int] = ()
    bad_losses: int = 0
    came_back: bool = False
    unseen: int = 0
    planned: bool = False
    exhausted: bool = False
    recurring: str = ""
    about_loss: bool = True
    objective: bool = True
    is_sum: bool = False
    rolled_back: bool = False
    sound: bool = False


def is_loss_rejoined(verdict: Verdict) -> bool:
    """Return whether the loss came back into its band."""
    return verdict.questions.rejoined.answer == YES


def is_loss_normal_again(verdict: Verdict) -> bool:
    """Return whether nothing is left of it: the loss was normal throughout, or it is back."""
    return verdict.kind in (SpikeClass.NO_EXCURSION, SpikeClass.RECOVERABLE)


def is_unexplained(verdict: Verdict) -> bool:
    """Return whether nothing is known of a loss that is high but that it is high.

    Its norms are as before, or the loss is no objective; and nothing else happened.
    """
    if verdict.kind == SpikeClass.UNDECIDED and verdict.no_objective:
        return True
    if verdict.kind not in (SpikeClass.ARTEFACT, SpikeClass.UNDECIDED) or proves_harm(verdict):
        return False
    questions = verdict.questions
    return questions.norms_stayed.answer == YES and not questions.else_happened.events


def proves_harm(verdict: Verdict) -> bool:
    """Return whether more than the loss has moved: what is not finite, an evaluation, the norms."""
    questions = verdict.questions
    norms = (questions.norms_stayed.metrics or {}).values()
    return (
        verdict.kind == SpikeClass.NUMERIC
        or questions.eval_shifted.answer == YES
        or questions.norms_stayed.answer == NO
        or any(norm.after < norm.before / NORM_RATIO for norm in norms)
    )


def wiring_faults(verdict: Verdict) -> list[ContextEvent]:
    """Return the faults of the job's wiring that were on record by the onset."""
    events = verdict.questions.else_happened.events
    return [event for event in events if event.kind == WIRING]


def verdict_clause(verdict: Verdict) -> str:
    """Return a verdict as one clause, without numbers."""
    text = SENTENCES[verdict.kind]
    if verdict.questions.rejoined.is_sum is True:
        text = OF_SUMS.get(verdict.kind, text)
    step = verdict.questions.rejoined.step
    causes = {SpikeClass.SCHEDULE: OWN_RATE, SpikeClass.DATA: "data", SpikeClass.CUT: "batch"}
    events = verdict.questions.else_happened.events
    for event in events:
        if event.kind == causes.get(verdict.kind):
            return f"{text}: {event.text} (step {event.step})"
    of_data = next((event.text for event in events if event.kind in ("data", GOOD_WEIGHTS)), "")
    if of_data and verdict.kind in NOT_BACK and verdict.questions.rejoined.answer == NO:
        return f"{NOT_BACK[verdict.kind]}: {of_data}"
    if verdict.kind == SpikeClass.UNDECIDED and (faults := wiring_faults(verdict)):
        return f"{text}; the wiring of the job may be it: {'; '.join(e.text for e in faults)}"
    if verdict.repaired:
        return f"there was {text}; the loss is back to normal after a rollback"
    if verdict.kind == SpikeClass.NUMERIC and is_loss_rejoined(verdict):
        return f"there was {text}; the loss is back to normal"
    if verdict.kind == SpikeClass.NO_EXCURSION and verdict.unseen:
        return f"the loss was normal in the steps that were seen; {verdict.unseen} were not"
    if verdict.kind == SpikeClass.NO_EXCURSION and not verdict.questions.rejoined.frames:
        return ""  # no loss was seen since, or the job has none
    if verdict.kind == SpikeClass.STRUCTURAL and verdict.questions.rejoined.answer == UNKNOWN:
        return "whether the loss comes back is not known"
    back = verdict.kind == SpikeClass.RECOVERABLE and step is not None
    return f"{text} since step {step}" if back else text


def classify_spike(case: Evidence) -> Verdict:
    """Answer the questions and name the class. Question 4 comes first where it explains all."""
    rejoined = answer_rejoined(case)
    questions = Questions(
        rejoined=structs.replace(rejoined, is_sum=True) if case.is_sum else rejoined,
        eval_shifted=answer_eval_shifted(case),
        norms_stayed=answer_norms_stayed(case),
        else_happened=answer_else_happened(case.happened),
    )
    kind, back = _class(case, questions), questions.rejoined.answer == YES
    return Verdict(
        kind,
        questions,
        recurring=case.recurring,
        skipped=tuple(case.skipped),
        repaired=kind == SpikeClass.NUMERIC
        and (case.rolled_back and back and not case.lasting and not case.came_back),
        unseen=case.unseen,
        no_objective=not case.objective,
    )


def _class(case: Evidence, questions: Questions) -> SpikeClass:
    rejoined_answer, back = questions.rejoined, questions.rejoined.answer
    shifted, normal = questions.eval_shifted.answer, questions.norms_stayed.answer
    # A skipped step is contained; one behind which the loss is NaN still, or after a rollback, not,
    # unless the weights were tested.
    again = case.bad_losses > 1 and not (case.skipped and case.sound)
    again |= bool(case.skipped and case.rolled_back)
    if case.nonfinite is not None or again:
        return SpikeClass.NUMERIC
    if case.bad_losses > 1:
        return SpikeClass.CONTAINED
    cause = _known_cause(case)
    # Of a loss that is no objective, as in reinforcement learning, neither height nor norms tell.
    unstable, suspect = (
        (SpikeClass.STRUCTURAL, SpikeClass.SUSPECT)
        if case.objective
        else (SpikeClass.UNDECIDED, SpikeClass.RECOVERABLE)
    )
    if case.exhausted:
        return cause or (SpikeClass.DATA if _is_of_data(case) else unstable)
    if not rejoined_answer.excursion and back != NO:
        return SpikeClass.CONTAINED if case.skipped else SpikeClass.NO_EXCURSION
    if case.planned:
        return SpikeClass.EXPECTED
    if back == YES:
        learned = normal != NO or _is_of_data(case)  # other data have other norms
        return (cause or suspect) if case.recurring or not learned else SpikeClass.RECOVERABLE
    if back == UNKNOWN or rejoined_answer.in_time:
        return SpikeClass.UNDECIDED
    if cause == SpikeClass.SCHEDULE:
        return SpikeClass.SCHEDULE
    if _is_of_data(case):
        return SpikeClass.DATA
    if normal == NO:  # whatever an evaluation says
        return cause or unstable
    if shifted == NO:
        return SpikeClass.ARTEFACT
    return cause or (SpikeClass.PLATEAU if shifted == YES else SpikeClass.UNDECIDED)


def _known_cause(case: Evidence) -> SpikeClass | None:
    """Return what the job changed itself just before, which explains the rest."""
    if _happened(case, OWN_RATE):
        return SpikeClass.SCHEDULE
    return SpikeClass.CUT if _happened(case, "batch") else None


def _is_of_data(case: Evidence) -> bool:
    """Return whether the data was other, or must have been as the weights are good."""
    return _happened(case, "data") or _happened(case, GOOD_WEIGHTS)


def _happened(case: Evidence, kind: str) -> bool:
    return any(happened.kind == kind for happened in case.happened)


def answer_rejoined(case: Evidence) -> Rejoined:
    """Question 1: did the raw and the smoothed loss come back into the band, and stay?

    `rejoined_step` begins the first whole good window: `window` frames whose two medians were
    within `band`, of which the first and all but a few were under the limit of a single loss. The
    answer is about the newest `window` frames. "no" is final only with `in_time` false.
    """
    band, count = case.band, len(case.after)
    if case.bad_losses > 1 or (case.bad_losses and case.lasting):
        which = f"{case.bad_losses} losses are" if case.bad_losses > 1 else "loss is"
        return Rejoined(answer=NO, text=f"the newest {which} NaN or Inf", excursion=True)
    if band is None:
        text = "too few losses before it to have a band"
        return Rejoined(answer=UNKNOWN, text=text, excursion=case.about_loss)
    seen = f"{count or 'no'} finite loss{'es' * (count > 1)} since step {band.onset}"
    measured = Rejoined(
        answer=UNKNOWN,
        text=f"{seen}, too few to decide",
        onset=band.onset,
        level=band.level,
        slope=band.slope,
        spread=band.spread,
        samples=band.samples,
        frames=count,
        peak=case.peak,
        excursion=case.about_loss or (case.peak is not None and case.peak > band.limit),
    )
    window = POST if count >= POST + WAIT else WAIT
    if count < window:
        return measured
    residuals = [loss - band.forecast(step) for step, loss in case.after]
    width, first_step = band.width(window), None
    is_high = [loss > band.limit_at(step) for step, loss in case.after]
    for begin in range(count - window + 1):
        end = begin + window
        if is_high[begin] or sum(is_high[begin:end]) > window // FEW_HIGH:
            continue
        if max(_raw_and_smooth_medians(residuals[begin:end])) <= width:
            first_step = case.after[begin][0]
            break
    newest, smoothed = _raw_and_smooth_medians(residuals[-window:])
    inside = max(newest, smoothed) <= width
    measured_text = (
        f"median of {window} losses {newest:+.3g} from the trend, smoothed {smoothed:+.3g}, "
        f"at most {width:.3g} above it"
    )
    text = f"{'back in' if inside else 'not back in'} its normal range ({measured_text})"
    if inside and (case.rolled_back or first_step is not None):
        text += ", after a rollback" if case.rolled_back else f" from step {first_step}"
    return structs.replace(
        measured,
        answer=YES if inside else NO,
        text=text,
        window=window,
        band=width,
        residual=newest,
        smoothed_residual=smoothed,
        rejoined_step=first_step,
        in_time=count < DEADLINE,
    )


def _raw_and_smooth_medians(residuals: Sequence[float]) -> tuple[float, float]:
    """Return the medians of the residuals and of their smoothed course.

    The smoothing begins with the window: its memory of the spike itself is no plateau.
    """
    smooth, smoothed_value = [], residuals[0]
    for value in residuals:
        smoothed_value = SMOOTH * smoothed_value + (1.0 - SMOOTH) * value
        smooth.append(smoothed_value)
    return median(residuals), median(smooth)


def answer_eval_shifted(case: Evidence) -> EvalShifted:
    """Question 2: did an evaluation of the same artefact move off its own trend, upwards?

    At least 4 evaluations before the onset and one 50 frames after it are needed; the newest 10
    before and the newest 4 after count. The first metric that has them answers.
    """
    band, late = case.band, case.after[POST - 1][0] if len(case.after) >= POST else None
    if band is None or not case.probes:
        return EvalShifted(answer=UNKNOWN, text="no evaluation to compare")
    if case.artefact == "changed":
        text = "the evaluation itself changed, so its values cannot be compared"
        return EvalShifted(answer=UNKNOWN, text=text, artefact=case.artefact)
    for metric, points in case.probes.items():
        earlier_points = [point for point in points if point[0] < band.onset][-10:]
        later_points = [point for point in points if late is not None and point[0] >= late][-4:]
        if len(earlier_points) < 4 or not later_points:
            continue
        gradient = theil_sen_slope(earlier_points, 1)
        log_step = math.log(earlier_points[-1][0] + 1.0)
        level = median(
            [value - gradient * (math.log(step + 1.0) - log_step) for step, value in earlier_points]
        )
        residuals = [
            value - level - gradient * (math.log(step + 1.0) - log_step)
            for step, value in earlier_points
        ]
        limit = max(PROBE_MADS * robust_spread(residuals, 0.0), PROBE_SHARE * abs(level))
        shift = median(
            [v - level - gradient * (math.log(step + 1.0) - log_step) for step, v in later_points]
        )
        # A trend that falls is left by one that falls more slowly: the values tell whether it rose.
        newest = median([value for _, value in later_points])
        text = (
            f"{metric} {shift:+.3g} from its trend since step {later_points[0][0]} (at most "
            f"{limit:.3g} above it): {newest:.3g}, {earlier_points[-1][1]:.3g} before"
        )
        # Within what a steep course leaves open, and yet above all before: no proof that it stayed.
        highest = max(value for _, value in earlier_points[-4:])
        may_have_risen = newest > highest + PROBE_SHARE * abs(level)
        return EvalShifted(
            answer=YES if shift > limit else UNKNOWN if may_have_risen else NO,
            text=text,
            metric=metric,
            shift=shift,
            limit=limit,
            before=level,
            evaluations=(len(earlier_points), len(later_points)),
            artefact=case.artefact,
        )
    return EvalShifted(answer=UNKNOWN, text="too few evaluations around it to compare")


def answer_norms_stayed(case: Evidence) -> NormsStayed:
    """Question 3: are the medians of the newest 50 norms within 1.5 times those of before?

    The share of clipped steps may double and grow by 2 points more.
    """
    numbers: dict[str, NormChange] = {}
    high: list[str] = []
    parts: dict[str, str] = {}
    for metric, (median_before, values) in case.norms.items():
        if len(values) < WAIT:
            continue
        median_after = median(values[-POST:])
        share = metric == CLIPPED
        limit = CLIP_FACTOR * median_before + CLIP_POINTS if share else NORM_RATIO * median_before
        numbers[metric] = NormChange(median_before, median_after, limit)
        parts[metric] = (
            f"{metric} x{median_after / median_before:.2g}"
            if median_after >= 0.001 * median_before > 0.0
            else f"{metric} {median_before:.3g} to {median_after:.3g}"
        )
        is_own_share = share and len(case.norms) > 1  # of 300 steps, with those of the spike
        if median_after > limit and not is_own_share:
            high.append(metric)
    if not numbers:
        return NormsStayed(answer=UNKNOWN, text="norms not measured long enough")
    fallen = [name for name, norm in numbers.items() if norm.after < norm.before / NORM_RATIO]
    word = "are up" if high else "are not up" if fallen else "as before"
    text = f"norms {word} ({', '.join(parts[name] for name in high or parts)})"
    return NormsStayed(answer=NO if high else YES, text=text, high=high, metrics=numbers)
