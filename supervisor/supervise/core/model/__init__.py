"""The nouns: events, decisions, actions, the policy, and the tables that they are judged by."""

from __future__ import annotations

from ...exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "action": "Action, EffectCheck, PlanContext, Refused",
        "checkpoint_registry": "Checkpoint, WEIGHTS_ONLY",
        "decisions": (
            "ActionFailed, ActionFinished, ActionOrder, ActionPlanned, ActionRef, BREACH, "
            "Decision, IncidentOpened, NearMiss, NoticeTaken, Notified, OK, RuleFired, "
            "SEVERITIES, UNKNOWN, decision_from_record, plain as plain_decision, "
            "record as decision_record"
        ),
        "events": (
            "Adopted, Announced, Beat, Event, Exited, Finished, Frame, Gap, Launched, Notice, "
            "OperatorCommand, PartChanges, PolicyChanges, Reloaded, Tick"
        ),
        "failure": (
            "Failure, FailureClass, LOG as LOG_FAILURE, THREAD as THREAD_FAILURE, "
            "classify as classify_failure"
        ),
        "formats": "reading as format_reading",
        "interfaces": "Detector, LossCurve, Message, NOTE as NOTE_MESSAGE, Note, NotifyError",
        "payload": "CheckpointState, NOTHING, Payload, Rewarm",
        "policy": (
            "Approval, Budget, Checkpoints, HOLD as HOLD_MODE, HostHealth, Inhibit, JobSettings, "
            "Ladder, Ledger, PLACEHOLDERS, Planned, Policy, Preempt, RelaunchSettings, Rule, "
            "Runbook, Safeguards, Sampling, Savepoints, SkipNonfinite"
        ),
        "preemption": "Preemption, Settled",
        "redaction": "REDACTED, Redactor, named as names_secret",
        "state_machine": (
            "DEFAULT as DEFAULT_TRANSITIONS, diagram as state_diagram, flaws as state_flaws"
        ),
        "verdicts": (
            "ContextEvent, ElseHappened, EvalShifted, NormsStayed, Questions, Rejoined, "
            "SpikeClass, Verdict"
        ),
    },
)
