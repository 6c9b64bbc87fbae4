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
            "child_environment, explain_ulimit_shortage, forecast_tier, inner_restarts, "
            "lock_run_directory, make_environment, mark_directory_owner, remove_environment, "
            "sweep_environments"
        ),
        "evidence": "Evidence",
        "fencing": (
            "Answer, PauseLease, PendingCommand, Standing, agree_on_step, common_step, "
            "find_step_mismatch"
        ),
        "frame_enrichment": "FrameEnricher",
        "hardware": "MemoryGrowth, Hardware",
        "host": (
            "HealthGate, OomCounters, Start, available_bytes, group_file, memory_bytes, "
            "read_git_facts, run_tool"
        ),
        "identity": "Identity, IdentityCollector, compare_identities, describe_differences",
        "idleness": "Looks, Phases, explain_movement",
        "late_messages": "Courier, UNDELIVERED_FILE, read_undelivered, write_undelivered",
        "launcher": "Launch, Launcher, first_environment, probe_config",
        "logs": "JobOutput, LogFiles, SupervisorLog",
        "loop": "FinalVerification, forward_save, may_come_back, run_position",
        "nvml_report": "driver_report",
        "output_relay": "OutputLog",
        "preemptor": "Preemptor",
        "process": "AdoptedProcess, Process, become_subreaper, exit_code",
        "process_tree": "Terminal, is_handled, start_ticks",
        "mechanisms": "MechanismMonitor, ReferenceCurves",
        "processor": "EventProcessor, Performer",
        "relauncher": "Relauncher, exit_code_by_policy, was_stopped_for",
        "segment_reader": "Ack, ProbeStatus, RankView, Segment, recorded_returncode",
        "segments": "ReadCursor, Segments",
        "settings": "RecoveredRun, Settings",
        "signals": "SignalForwarder",
        "stacks": "RankSurvey, ask_for_stacks, main_frames, deepest_own_frame, py_spy_dump",
        "status": (
            "Life, Status, TrainingProgress, build_status, explain_missing_probe, "
            "format_capabilities, is_rollback_known, judge_ending, judge_status, list_capabilities"
        ),
        "status_writer": "FailureRecords, first_step_deadline_s",
        "watches": "ControlInbox, FileWatch, PolicyWatch, checkpoint_targets, post_command",
    },
)
