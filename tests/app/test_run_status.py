"""A start that works is slow, and no reason to say that no step was seen."""

from __future__ import annotations

import pytest

from supervise.runtime import first_step_deadline_s


@pytest.mark.parametrize(
    ("marks", "worked_s", "deadline_s"),
    [
        ({"boot", "armed"}, 0.0, 120.0),  # it waits for something from the start
        ({"boot", "armed"}, 700.0, 820.0),  # it loads a model, or compiles
        ({"boot", "armed"}, 9000.0, 3600.0),
        ({"boot"}, 700.0, 820.0),  # it prepares its data
        ({"boot"}, 9000.0, 900.0),  # another framework than torch trains
        (set(), 700.0, 120.0),  # no Python of ours was started
    ],
)
def test_a_first_step_is_waited_for_while_the_job_works(marks, worked_s, deadline_s):
    assert first_step_deadline_s(marks, worked_s) == deadline_s
