"""`FAULT:name=value@STEP` on the command line."""

import pytest

from supervise.catalog.inventory import drills
from supervise.errors import UsageError


def test_a_drill_fills_in_its_parameters_and_may_name_a_rank():
    assert drills.parse("moments:how=restart@9") == {
        "fault": "moments",
        "step": 9,
        "params": {"how": "restart", "factor": 1e-4},
    }
    assert drills.parse("slow_input:rank=1@9")["rank"] == 1
    assert "rank" not in drills.parse("slow_input@9")


@pytest.mark.parametrize("text", ["slow_input:rank=x@9", "slow_input:rank@9", "_tokens@9"])
def test_what_is_no_drill_is_refused(text):
    with pytest.raises(UsageError, match=r"no parameter 'rank'|no fault '_tokens'"):
        drills.parse(text)
