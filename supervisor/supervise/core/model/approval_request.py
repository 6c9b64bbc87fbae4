"""A runbook that a person is asked about, while the answer is awaited."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class ApprovalRequest:
    """A request that waits. The first fields are those with which the runbook is started.

    Attributes:
        plan: `{"verb", "args"}` of every step that touches the job.
        sha: sha256 of the plan. policy: digest of the policy that wants it.
        granted: who allowed it, while the evidence is still being taken.
    """

    id: str
    incident: str
    runbook: str
    level: int
    why: str
    escalated: bool
    severity: str
    plan: list[dict[str, Any]]
    sha: str
    policy: str
    deadline_ns: int
    on_timeout: str
    granted: str = ""
