"""The pure core: no clock, disk, network, chance, logging.

Time reaches it inside events; what it wants done leaves it as decisions. The same events give the
same decisions, byte for byte, which is what makes a run replayable.
"""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "action_planning": "plan_context, savepoint_retention_bound",
        "advice": (
            "Fact, advise_relaunch_only, choose_advice, describe_pending_stop, "
            "describe_runbook_progress"
        ),
        "checkpoint_wait": "awaited_checkpoint_bound",
        "diagnosis": "describe_recurring_onsets, has_reward",
        "engine": "compare_decisions, fold_events, initial_state, step",
        "frames": "JobFrames, combine_rank_values",
        "host_health": (
            "Device, Finding, judge_devices, judge_disk, judge_matmul, judge_memory, health_summary"
        ),
        "incident": "Incident, Intent, RunbookExecution",
        "job_lifecycle": "has_start_failed",
        "job_recipes": "ScriptCode, fill_recipe, recognise_recipe",
        "notices": (
            "breach_headline, breach_symptom, describe_crash, describe_end, describe_finding, "
            "describe_job_end, describe_no_restart, describe_session_end"
        ),
        "reasons": (
            "Breach, CheckGap, CheckTimeout, DiskFree, HostState, Judged, Lack, MemoryRows, "
            "Reported"
        ),
        "run_notices": "CLAUSES, NOTICES, news_of",
        "policy_reload": "policy_differences",
        "rank_monitor": "RankMonitor, can_fire",
        "rule_scope": "needs_dense_sampling",
        "run_phase": "RunPhase, find_rate_cause, find_rate_growth",
        "run_state": "ApprovalRequest, MessageDraft, State",
        "shard_attribution": "ShardAttribution",
        "spike_classifier": "Evidence, classify_spike, wiring_faults",
        "standstill": "Collective, LoaderWorker, RankStand, explain_standstill",
        "trends": (
            "Band, TaskAlternation, detect_input_change, find_change, find_jump, find_slow_step, "
            "fit_data_level, fit_loss_band"
        ),
        "withdrawal": "explain_withdrawal",
    },
)
