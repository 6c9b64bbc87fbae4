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
        "checkpoint_choice": "needed_before",
        "diagnosis": "recurring_causes",
        "engine": (
            "compare as compare_decisions, decisions as replayed_decisions, "
            "record as record_run, start as start_engine, step as step_engine"
        ),
        "frames": (
            "COLUMNS as FRAME_COLUMNS, HOLD_NS as FRAME_HOLD_NS, JobFrames, "
            "MISSES as FRAME_MISSES, fold as fold_frames"
        ),
        "host_health": (
            "Device, Finding, KIND as HEALTH_KIND, judge_devices, judge_disk, judge_matmul, "
            "judge_memory, summary as health_summary"
        ),
        "incident": (
            "HELD, Incident, Intent, RunbookExecution, first_breach, headline as incident_headline"
        ),
        "job_lifecycle": "SHORT as SHORT_RUN, UNPROTECTED, start_failed",
        "job_recipes": "Recipe, fill as fill_recipe, recognise as recognise_recipe",
        "notices": "by_hand, in_hold",
        "policy_reload": "differences as policy_differences",
        "rank_monitor": "can_fire",
        "rule_scope": "needs_dense_sampling",
        "run_phase": "RunPhase, growth as phase_growth, weigh as weigh_phase",
        "run_state": "ApprovalRequest, MessageDraft, MessageDrafts, State, StepContext",
        "shard_attribution": (
            "SHARDS as MAX_SHARDS, ShardAttribution, binomial_tail, normal_tail, "
            "survivors as surviving_shards"
        ),
        "spike_classifier": ("Evidence, judge as judge_spike"),
        "standstill": "Collective, LoaderWorker, RankStand, explain as explain_standstill",
        "trends": "Band, band_of, find_slow_step",
        "withdrawal": (
            "CLEARED, ENDED as RUN_ENDED, UNPAUSED, is_pause_gone, withdrawn as withdrawn_requests"
        ),
    },
)
