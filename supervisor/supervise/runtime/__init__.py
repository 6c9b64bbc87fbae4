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
            "LAUNCH as LAUNCH_FILE, child_environment, inner_restarts, lend as lend_directory, "
            "make as make_environment, remove as remove_environment, "
            "sweep as sweep_environments, take_ownership, tier as directory_tier"
        ),
        "evidence": "Evidence, metrics_csv, trace as trace_origins",
        "failures": "FailureRecords",
        "fencing": (
            "Answer, Lease, PendingCommand, agree as agree_fences, objection as fence_objection"
        ),
        "foreground": "PATIENCE_S",
        "frame_enrichment": "FrameEnricher",
        "hardware": "Growth, Hardware",
        "host": (
            "HealthGate, available_bytes, HostMemo, OomCounters, Start, git as git_facts, group_file, "
            "output_files, run_tool, tail as tail_of_output"
        ),
        "nvml_report": "driver_report",
        "identity": (
            "ByteBudget, Device, Identity, IdentityCollector, describe as describe_differences, differences as identity_differences"
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
        "process": "AdoptedProcess, Process, become_subreaper, exit_code",
        "process_tree": "Terminal, alive as is_alive, is_handled, start_ticks",
        "processor": "EventProcessor, Performer, SLACK_S as PERFORMER_SLACK_S",
        "relauncher": "Relauncher, ends_with, stopped_for",
        "segment_reader": (
            "Ack, DATA as SEGMENT_DATA, OWN as SEGMENT_OWN, ProbeStatus, RankView, Segment, "
            "recorded_end"
        ),
        "segments": "ReadCursor, Segments",
        "settings": "RecoveredRun, Settings",
        "signals": "Forwarder",
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
            "ControlInbox, DIRECTORY as CONTROL_DIRECTORY, FileWatch, PolicyWatch, "
            "checkpoint_targets, post as post_command"
        ),
    },
)
