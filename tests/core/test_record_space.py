"""What people are told when the record of the run has no space."""

from __future__ import annotations

import pytest

from supervise.core import SHORT_RUN, UNPROTECTED, start_engine, step_engine
from supervise.core.model import Notice, Policy

FACTS = {
    "need_bytes": 19_000_000,
    "reserve_bytes": 18_000_000,
    "seconds": 720,
    "mount": "/data",
    "runs": "/data/runs",
}


def told(kind, *, acts):
    policy = Policy("quiet", "sha256:0", "enforce", {}, ())
    text = "the disk of /data/runs/a: No space left on device"
    event = Notice(1, kind, text, data={**FACTS, "acts": acts})
    _, decisions = step_engine(policy, start_engine(policy), event)
    return decisions[-1].data["message"]


@pytest.mark.parametrize("kind", [SHORT_RUN, UNPROTECTED])
def test_every_channel_is_told_what_to_free(kind):
    """SEV1, whatever the channels take; with path, bytes and command."""
    message = told(kind, acts=True)

    assert (message["severity"], message["to_all"]) == ("SEV1", True)
    assert message["next"].startswith(
        "free 19 MB on /data; what fills it: du -xm /data | sort -n | tail; "
        "old runs: supervise gc --older-than 1d /data/runs"
    )
    if kind == SHORT_RUN:
        assert (
            "a reserve of 18 MB, about 12 min at this rate, and actions go on" in message["verdict"]
        )
    else:
        assert message["next"].endswith("to go on from: supervise checkpoints RUN")


def test_a_run_that_is_only_observed_loses_no_protection():
    """Its channels are told as their severities say."""
    message = told(SHORT_RUN, acts=False)

    assert message["severity"] == "SEV2" and "to_all" not in message
    assert "nothing is acted on" not in message["verdict"]
