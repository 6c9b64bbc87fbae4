"""The text of every kind of message and clause, of sample facts; of some also of other facts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from supervise.core import CLAUSES, NOTICES
from supervise.core.model import Advice, SpikeClass

FACTS: dict[str, Any] = {
    "severity": "SEV1",
    "incident": "inc-1",
    "advice": Advice(),
    "rule": "a.b",
    "expression": "x and y",
    "numbers": "loss 9 (limit 5)",
    "subject": "loss 9",
    "step": 7,
    "steps": 500,
    "changes": 7,
    "before_step": 50,
    "candidates": 3,
    "spike": SpikeClass.PLATEAU,
    "nonfinite_since": None,
    "summary": "the loss is back to normal",
    "headline": "loss 9",
    "cause": "nothing helped",
    "status": "the job keeps training",
    "runbook": "restart",
    "refusal": "no way",
    "outcome": "code 1",
    "plan": "pause, resume",
    "request": "ask-1",
    "timeout_s": 900.0,
    "consequence": "they hold memory",
    "on_timeout": "deny",
    "matters": True,
    "event": "no-probe",
    "limit": None,
    "error": "no answer",
    "operator": "anna",
    "mode": "shadow",
    "name": "nano",
    "proof": "loss 2.4 (2.4 before)",
    "standstill": "rank 2 waits",
    "things": "another rate",
    "differences": "rate 1",
    "names": "a.weight, 7 more",
    "made": "train.py:7",
    "count": 8,
    "total": 10,
    "share": 85.4,
    "copies": 3.0,
    "rows": 2.0,
    "ratio": 2.0,
    "since": 25,
    "rate": 1e-9,
    "course": "no",
    "scale": "65536",
    "otherwise": "",
    "epoch": 3.0,
    "expected": 1.5,
    "skipped": 1.5,
    "text": "rank 0 said so",
    "meaning": "out of memory",
    "path": "/c/7",
    "signals": "SIGTERM",
    "checkpoint": "c-5",
    "checkpoint_step": 5,
    "command": "kill 7",
    "pid": 7,
    "end": "ended with code 1",
    "failure": "MemoryError",
    "others": "3 others",
    "damage": "cut",
    "shortfall": "7 of 9 steps",
    "acts": True,
    "mount": "/d",
    "need_bytes": 200_000_000,
    "runs": "/d/runs",
    "reserve_bytes": 8_000_000,
    "seconds": 600.0,
    "channel": "slack",
    "messages": "2 messages were",
    "silent_s": 21.2,
    "lost": 2,
    "equal": 100,
    "titles": "[SEV1] a · [SEV2] b",
    "signal": "SIGTERM",
    "good": "c-5",
    "good_step": 5,
    "growth": "thrice within 40 steps",
    "rate_growth": "the rate doubled",
    "mechanisms": "attention moved first",
    "verb": "rollback",
    "substituted": "back: no savepoint",
    "value": 0.25,
    "before": 0.125,
    "is_from_start": True,
    "behind": 12,
    "earlier": 3,
    "more": 2,
    "times": 3,
    "farthest": 40,
    "cls": "oom",
}
# What is else in a kind; None: the fact is left out.
OTHERS: dict[str, list[dict[str, Any]]] = {
    "AlwaysClipped": [{"share": 100.0, "ratio": 65536.0}, {"scale": None, "otherwise": "so"}],
    "AlsoRecorded": [{"more": None}],
    "ChannelFailed": [{"messages": "1 message was", "silent_s": None}],
    "ChannelRecovered": [{"lost": None}],
    "CheckpointDamaged": [dict.fromkeys(("good", "good_step"))],
    "Diagnosed": [{"spike": SpikeClass.NUMERIC, "nonfinite_since": 200}],
    "Digest": [{"messages": "2 messages"}],
    "EndAsked": [{"step": -1}],
    "EvidenceOf": [{"standstill": None}],
    "ApprovalAsked": [{"on_timeout": "allow"}],
    "GoesOnOtherwise": [{"matters": False}],
    "HeldByRunbook": [{"failure": None}],
    "Held": [{"summary": None, "limit": "nothing is left to try"}],
    "JobFailed": [{"failure": None, "meaning": None}, dict.fromkeys(("cause", "others"))],
    "LossCutOff": [{"made": None}],
    "NothingPossible": [{"status": "", "substituted": None}],
    "PolicyInForce": [{"changes": "one rule"}],
    "PreemptFailed": [{"step": -1}, dict.fromkeys(("checkpoint", "checkpoint_step"))],
    "PreemptSaved": [dict.fromkeys(("path", "signals"))],
    "RateDiffers": [{"is_from_start": False, "behind": 0}],
    "RecordEnded": [{"acts": False, "need_bytes": None}],
    "RecordSpaceEnough": [{"acts": False}],
    "RecordSpaceShort": [{"acts": False, "reserve_bytes": 8_000, "seconds": 60.0}],
    "ReplicasDiffer": [{"equal": None}],
    "RuleNumbers": [dict.fromkeys(("growth", "rate_growth", "mechanisms"))],
    "ScheduleOver": [{"since": None}],
    "StoppedBy": [{"step": -1}],
    "Unprotected": [{"pid": None}],
    "Unwatched": [{"pid": None}],
    "WeightsStandStill": [{"ratio": 1e-7, "course": None}],
}


def _texts() -> Iterator[str]:
    for kind, form in NOTICES.items():
        for other in ({}, *OTHERS.get(kind, ())):
            facts = {name: FACTS[name] for name in form.__struct_fields__} | other
            notice = form(**{name: fact for name, fact in facts.items() if fact is not None})
            added = f" {other}" if other else ""
            texts = {"what": notice.verdict, "why": notice.reason, "next": notice.next.text}
            lines = [f"{name}: {text}" for name, text in texts.items() if text]
            yield "\n    ".join([f"== {kind}{added}", notice.title, *lines])
    for kind, part in CLAUSES.items():
        for other in ({}, *OTHERS.get(kind, ())):
            facts = {name: FACTS[name] for name in part.__struct_fields__} | other
            clause = part(**{name: fact for name, fact in facts.items() if fact is not None})
            yield f"== {kind}{f' {other}' if other else ''}\n    {clause.text}"


def notices() -> str:
    """Return the whole file."""
    return "\n".join(_texts()) + "\n"
