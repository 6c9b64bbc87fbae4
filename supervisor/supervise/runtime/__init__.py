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
            "child_environment, inner_restarts, lend as lend_directory, "
            "make as make_environment, remove as remove_environment, "
            "sweep as sweep_environments, take_ownership, tier as directory_tier"
        ),
        "evidence": "Evidence",
        "failures": "FailureRecords",
        "fencing": (
            "Answer, Lease, PendingCommand, agree as agree_fences, objection as fence_objection"
        ),
        "frame_enrichment": "FrameEnricher",
        "hardware": "Growth, Hardware",
        "host": (
            "HealthGate, HostMemo, OomCounters, Start, available_bytes, git as git_facts, "
            "group_file, run_tool"
        ),
        "identity": (
            "Identity, IdentityCollector, describe as describe_differences, "
            "differences as identity_differences"
        ),
        "idleness": "Looks, Phases, movement as process_movement",
        "late_messages": (
            "Courier, FILE as UNDELIVERED_FILE, read as read_undelivered, "
            "write as write_undelivered"
        ),
        "launcher": "Launch, Launcher, first_environment, probe_config",
        "logs": "JobOutput, LogFiles, SupervisorLog",
        "loop": "forward_save, may_come_back",
        "nvml_report": "driver_report",
        "output_relay": "Log as OutputLog",
        "preemptor": "Preemptor",
        "process": "AdoptedProcess, Process, become_subreaper, exit_code",
        "process_tree": "Terminal, is_handled, start_ticks",
        "processor": "EventProcessor, Performer",
        "relauncher": "Relauncher, ends_with, stopped_for",
        "segment_reader": "Ack, ProbeStatus, RankView, Segment, recorded_end",
        "segments": "ReadCursor, Segments",
        "settings": "RecoveredRun, Settings",
        "signals": "Forwarder",
        "stacks": "RankSurvey, ask as ask_for_stacks, main_frames, own_place, py_spy",
        "status": (
            "Life, Status, TrainingProgress, capabilities as probe_capabilities, is_known, "
            "line as status_line, snapshot as status_snapshot, verdict as status_verdict"
        ),
        "status_writer": "first_step_deadline_s",
        "watches": "ControlInbox, FileWatch, PolicyWatch, checkpoint_targets, post as post_command",
    },
)
