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
            "CLEARED, Decision, IncidentClosed, IncidentOpened, IncidentRaised, MessageText, "
            "NearMiss, NoticeTaken, Notified, OK, PlannedStep, RuleFired, SEVERITIES, Suppressed, "
            "UNKNOWN, "
            "decision_from_record, decode_numbers, plain_json, decision_record"
        ),
        "events": (
            "Adopted, Announced, Beat, Event, Exited, Finished, Frame, Gap, LateFrame, Launched, "
            "Notice, OperatorCommand, PartChanges, PolicyChanges, Reloaded, Tick"
        ),
        "failure": "Failure, FailureClass, LOG_FAILURE, THREAD_FAILURE, classify_failure",
        "formats": "format_reading",
        "interfaces": "Advice, Detector, Lead, Message, HAS_NOTE, Note, NotifyError, Step",
        "payload": "CheckpointState, NOTHING, Payload, Rewarm",
        "policy": (
            "Approval, Budget, Checkpoints, HOLD, HostHealth, Inhibit, JobSettings, "
            "Evaluate, Ladder, Ledger, Mechanisms, PLACEHOLDERS, Planned, Policy, Preempt, "
            "RelaunchSettings, Rule, Runbook, Safeguards, Sampling, Savepoints, SkipNonfinite, "
            "Tasks, Toxicity"
        ),
        "preemption": "Preemption, Settled",
        "redaction": "REDACTED, Redactor, channel_variables",
        "state_machine": "DEFAULT_TRANSITIONS, STATES, find_flaws",
        "verdicts": (
            "ContextEvent, ElseHappened, EvalShifted, NormChange, NormsStayed, Questions, "
            "Rejoined, SpikeClass, Verdict"
        ),
    },
)
