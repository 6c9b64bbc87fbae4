"""Evidence against weights that were good at the onset: one decision per onset.

Once the probe batch has shown that the weights were good when the loss rose, another loss of that
batch shows no more than that the model has learned since: also from data that it was meant to
learn. Acting on the same onset needs something new. A loss that falls by itself is not; nor are
token statistics that stepped together with it, which is a change of the data.
"""

from __future__ import annotations

import math

from ..analysis import data_change
from ..analysis.data_change import InputChange, LossCourse
from ..detection.rank_monitor import LOSS
from ..state.incident import Incident, WithdrawnRunbook
from ..state.run_state import State
from . import withdrawal

UNLIKE = 1.25  # times, in logs: more than noise makes of two alike. Project default


def input_change(state: State, incident: Incident) -> InputChange | None:
    """Return how the inputs have changed since the incident's onset."""
    monitor = state.monitors.get(incident.case.rank)
    if monitor is None:
        return None
    series = {name: monitor.history.series(name) for name in data_change.TOKENS}
    return data_change.input_change(series, incident.breach_step)


def loss_course(state: State, incident: Incident, since: int) -> LossCourse | None:
    """Return where the losses have gone since a step."""
    monitor, band = state.monitors.get(incident.case.rank), incident.case.band
    if monitor is None or band is None:
        return None
    return data_change.loss_course(monitor.history.series(LOSS), band, incident.breach_step, since)


def data_event(state: State, incident: Incident) -> str:
    """Return what shows that the data changed and is being learned, "" where nothing does."""
    change = input_change(state, incident)
    course = loss_course(state, incident, incident.breach_step)
    if change is None or change.degenerate or course is None or not course.fallen:
        return ""
    fell = f"the loss fell by itself, from {course.first:.4g} to {course.newer:.4g}"
    return f"the data changed at step {incident.breach_step}: {change.text}; {fell}"


def better_on_new_data(
    state: State, incident: Incident, old: WithdrawnRunbook, probe_loss: float
) -> str:
    """Return that what comes in is learned while the probe batch is forgotten, "" where not.

    Damage does as much to both, if they are of the same data; where token statistics show that they
    are, nothing is asked.
    """
    monitor, band = state.monitors.get(incident.case.rank), incident.case.band
    course = loss_course(state, incident, incident.breach_step)
    if monitor is None or band is None or course is None or not course.fallen:
        return ""
    if any(name in monitor.history.names for name in data_change.TOKENS):
        return ""
    usual = band.forecast(monitor.step)
    if not 0.0 < usual * probe_loss < math.inf or not 0.0 < old.loss < math.inf:
        return ""
    forgotten, lacking = math.log(probe_loss / old.loss), math.log(course.newer / usual)
    if forgotten <= UNLIKE * lacking:
        return ""
    return (
        f"the model has learned other data: their loss is {course.newer:.4g}, {usual:.4g} was "
        f"expected; that of the probe batch rose from {old.loss:.4g} to {probe_loss:.4g}"
    )


def new_evidence(state: State, incident: Incident, old: WithdrawnRunbook) -> str:
    """Return what speaks against the weights since they were found good, "" for nothing."""
    change = input_change(state, incident)
    if change is not None and change.degenerate:
        # The same batches would go on damaging what was taken back.
        ill = withdrawal.is_loss_out_of_band(state, incident)
        return change.text if ill and not change.lasting else ""
    course = loss_course(state, incident, old.step)
    if course is not None and course.jump > 0.0:
        return f"the loss jumped again, by {course.jump:.4g}, since step {old.step}"
    if course is None or course.change < 0.0 or not withdrawal.is_loss_out_of_band(state, incident):
        return ""
    if course.change > 0.0:
        return f"the loss rises again, from {course.older:.4g} to {course.newer:.4g}"
    if old.data_event or data_event(state, incident):
        return ""
    return f"the loss stays at {course.newer:.4g} since step {old.step} and falls no further"
