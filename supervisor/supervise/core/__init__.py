"""The pure core: no clock, disk, network, chance, logging.

Time reaches it inside events; what it wants done leaves it as decisions. The same events give the
same decisions, byte for byte, which is what makes a run replayable.
"""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "action_planning": "plan_context, retain_before",
        "checkpoint_wait": "needed_before",
        "diagnosis": "recurring_causes",
        "engine": (
            "compare as compare_decisions, decisions as replayed_decisions, "
            "record as record_run, start as start_engine, step as step_engine"
        ),
        "frames": "JobFrames, fold as fold_frames",
        "host_health": (
            "Device, Finding, judge_devices, judge_disk, judge_matmul, judge_memory, "
            "summary as health_summary"
        ),
        "incident": "HELD, Incident, Intent, RunbookExecution",
        "job_lifecycle": "start_failed",
        "job_recipes": "ScriptCode, fill as fill_recipe, recognise_recipe",
        "policy_reload": "differences as policy_differences",
        "rank_monitor": "can_fire",
        "rule_scope": "needs_dense_sampling",
        "run_phase": "RunPhase, growth as phase_growth, weigh as weigh_phase",
        "run_state": "ApprovalRequest, State",
        "shard_attribution": "ShardAttribution",
        "spike_classifier": "Evidence, classify_spike",
        "standstill": "Collective, LoaderWorker, RankStand, explain as explain_standstill",
        "trends": "Band, band_of, find_slow_step",
        "withdrawal": "explain_withdrawal",
    },
)
