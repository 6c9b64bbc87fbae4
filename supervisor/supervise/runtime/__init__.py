"""The supervisor of one run: its loop, its job, its inputs and outputs.

`settings` is what a run is started with, `launcher` starts the job, `processor` turns events into
decisions and these into actions, `loop` reads all inputs in turn for as long as the job lives, and
`foreground` is the main thread beside it.
"""

from __future__ import annotations

from ..exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    {
        "adoption": "Adoption",
        "controller": "Control",
        "environment": (
            "LAUNCH as LAUNCH_FILE, child_environment, inject_dir, inner_restarts, "
            "lend as lend_directory, make as make_environment, remove as remove_environment, "
            "sweep as sweep_environments, take_ownership, tier as directory_tier"
        ),
        "evidence": "Evidence, metrics_csv, trace as trace_origins",
        "failures": "FailureRecords",
        "fencing": (
            "Answer, Lease, PendingCommand, WAIT_S as FENCE_WAIT_S, agree as agree_fences, "
            "objection as fence_objection"
        ),
        "foreground": "PATIENCE_S",
        "frame_enrichment": (
            "CROSS_RANK_METRICS, ERRORS as LOG_ERRORS, FrameEnricher, LAG as RANK_LAG, "
            "MISSING as RANKS_MISSING, OWN_STEPS, OwnTimes, RESTARTS, RUN_METRICS, Ranks, "
            "RunMetrics, job_numbers, skips_apart, together as join_ranks"
        ),
        "hardware": (
            "FIRST as FIRST_SAMPLE, Growth, Hardware, METRICS as HARDWARE_METRICS, "
            "MINUTES as GROWTH_MINUTES, SETTLE as GROWTH_SETTLE, SOON_S"
        ),
        "host": (
            "HealthGate, HostMemo, OomCounters, Start, git as git_facts, group_file, "
            "output_files, run_tool, tail as tail_of_output"
        ),
        "identity": (
            "ByteBudget, Device, Identity, IdentityCollector, differences as identity_differences"
        ),
        "idleness": "Looks, Phases, movement as process_movement, work as process_work",
        "late_messages": (
            "Courier, FILE as UNDELIVERED_FILE, read as read_undelivered, "
            "write as write_undelivered"
        ),
        "launcher": "Launch, Launcher, first_environment, probe_config",
        "logs": "BEHIND as LOG_BEHIND, JobOutput, LogFiles, PER_CLASS, SupervisorLog",
        "loop": "forward_save, may_come_back",
        "output_relay": "Log as OutputLog",
        "preemptor": "Preemptor",
        "process": (
            "AdoptedProcess, JobEnd, Process, become_subreaper, exit_code, spawn as spawn_job"
        ),
        "process_tree": (
            "Terminal, alive as is_alive, is_handled, start_ticks, suspended as is_suspended"
        ),
        "processor": "EventProcessor, Performer, SLACK_S as PERFORMER_SLACK_S",
        "relauncher": (
            "MARGIN_S as RELAUNCH_MARGIN_S, Relauncher, STOP_S as RELAUNCH_STOP_S, ends_with, "
            "stopped_for"
        ),
        "segment_reader": (
            "Ack, DATA as SEGMENT_DATA, OWN as SEGMENT_OWN, ProbeStatus, RankView, Segment, "
            "recorded_end"
        ),
        "segments": "ReadCursor, Segments",
        "settings": "RecoveredRun, Settings",
        "signals": "FORWARDED as FORWARDED_SIGNALS, Forwarder, Wakeup",
        "stacks": (
            "RankSurvey, STACKS as STACKS_FILE, ask as ask_for_stacks, "
            "catches as catches_signal, kernel as kernel_stack, main_frames, own_place, py_spy"
        ),
        "status": (
            "EndCause, Incidents, Life, LossCurve, OpenIncident, POINTS as PROGRESS_POINTS, "
            "Request, Status, Training, TrainingProgress, capabilities as probe_capabilities, "
            "is_known, line as status_line, planned_in, snapshot as status_snapshot, "
            "verdict as status_verdict"
        ),
        "status_writer": "first_step_deadline_s",
        "watches": (
            "ControlInbox, DIRECTORY as CONTROL_DIRECTORY, FileWatch, PolicyWatch, Target, "
            "checkpoint_targets, post as post_command"
        ),
    },
)
