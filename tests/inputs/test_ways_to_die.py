"""Ways in which a job ends, each with a real process: what people read of it, in all places."""

import json
import re
import signal
import time
from types import SimpleNamespace

import pytest

from supervise.catalog import failure_classes
from supervise.core import initial_state
from supervise.core import step as step_engine
from supervise.core.model import Exited, Failure, Launched, Policy, classify_failure
from supervise.core.model import decision_record as record
from supervise.notifiers import build_webhook_body, message_of, render_console
from supervise.report import Record, failure_lines, launch_failures
from supervise.runtime import Evidence, FailureRecords, OomCounters, group_file
from supervise_probe.runtime import failure

from ..outputs.conftest import FakeWitness

LOOP = "def train():\n    for step in range(9):\n        if step == 3:\n            {}\ntrain()\n"
POOL = """
import multiprocessing
def read(n):
    raise KeyError(f"record {n}")
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.map(read, [7])
"""
PARSES = "import argparse\nargparse.ArgumentParser().parse_args(['--lr'])\n"
CUDA = "class OutOfMemoryError(RuntimeError): pass\n" + LOOP.format(
    "raise OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')"
)
# What torchrun raises when ranks have failed, and the file that a rank under `record` leaves.
CHILD = """
import json
class ChildFailedError(Exception): pass
class Failure:
    pid, exitcode, error_file = 4242, {code}, "error.json"
stack = 'File "train.py", line 7, in step'
record = {{"message": {{"message": "OSError: lost", "extraInfo": {{"py_callstack": stack}}}}}}
if {code} > 0:
    json.dump(record, open("error.json", "w"))
error = ChildFailedError("two lines\\nof ====")
error.failures = {{1: Failure(), 0: Failure()}}
error.failures[0].pid, error.failures[0].exitcode, error.failures[0].error_file = 4243, -15, ""
raise error
"""
FULL = LOOP.format("open('/dev/full', 'w').write('x' * 99999)")
KILL = "import os\nos.kill(os.getpid(), 9)\n"
SECRET = LOOP.format("raise KeyError(__import__('os').environ['MY_TOKEN'])")

# Way -> script, exit code, what people read, class.
WAYS = {
    "rank": (LOOP.format("raise KeyError('x')"), 1, r"'x' at train.py:4 \(rank 1\)", "data-error"),
    "import": ("import no_such", 1, "Error: No module named 'no_such' at train.py:1", "import"),
    "syntax": ("x = = 1", 1, "SyntaxError: invalid syntax.* at train.py:1", "syntax"),
    "argument": (PARSES, 2, "argparse refused the arguments at train.py:2", "arguments"),
    "code": (LOOP.format("__import__('sys').exit(3)"), 3, r"^sys.exit\(3\) at train.py:4$", ""),
    "exit": (LOOP.format("__import__('sys').exit('no data')"), 1, "no data at train.py:4", ""),
    "pool": (POOL, 1, r"KeyError: 'record 7' at train.py:4 \(another process\)", "data-error"),
    "full disk": (FULL, 1, "OSError: .Errno 28. No space left .* at train.py:4", "disk-full"),
    "device": (CUDA, 1, "OutOfMemoryError: CUDA out of memory. .* at train.py:5", "cuda-oom"),
    "native": ("import ctypes\nctypes.string_at(0)", -11, "SIGSEGV at .*train.py:2", "crash"),
    "rank killed": (CHILD.format(code=-9), 1, r"SIGKILL \(rank 1\)", "killed"),
    "error file": (CHILD.format(code=1), 1, r"OSError: lost at train.py:7 \(rank 1\)", ""),
    "kernel": (KILL, -9, "SIGKILL: the kernel's out of memory killer ended 1", "host-oom"),
    "secret": (SECRET, 1, "KeyError: '<redacted>'", "data-error"),
}


def records_in(folder, known=(), counter=None):
    return FailureRecords(
        folder, failure_classes, OomCounters(counter, folder / "none"), set, known
    )


@pytest.fixture
def records(tmp_path):
    return records_in(tmp_path)


@pytest.fixture
def died(make_folder, launch, tmp_path):
    def run(script, code, *, environ=(), kernel=False):
        folder, counter = make_folder(), tmp_path / "memory.events"
        counter.write_text("oom 0\noom_kill 4\n")
        records = records_in(folder / "probe", counter=counter)
        records.on_launch()
        launch(script, folder=folder, code=code, environ=environ)
        if kernel:
            counter.write_text("oom 1\noom_kill 5\n")
        (pid,) = (int(path.name.split(".")[1]) for path in (folder / "probe").glob("boot.*"))
        return outcome(records.on_exit(pid, code, time.monotonic_ns(), {}), tmp_path, code)

    return run


def outcome(notices, folder, code):
    policy = Policy("test", "sha256:0", "observe", {}, ())
    state, decisions = initial_state(policy), []
    for event in (Launched(0, 1, 0), *notices, Exited(time.monotonic_ns(), code)):
        state, made = step_engine(policy, state, event)
        decisions += made
    message = message_of([d for d in decisions if d.kind == "notify_intent"][-1], "run", "head")
    failures = {"failures": lambda: state.job.failures_by_cause}
    evidence = Evidence(folder / "incidents", folder, list, directory=folder, **failures)
    bundle = folder / evidence.collect(FakeWitness([]), "inc-1", "k", 5.0).path
    head = {"seq": 0, "actor": "engine", "mono_ns": 0}
    records = [Record.decode(record(decision) | head) for decision in decisions]
    return SimpleNamespace(
        cause=state.job.cause,
        console=render_console(message, colour=False),
        webhook=json.loads(build_webhook_body(message))["data"],
        bundle=json.loads((bundle / "failures.json").read_text()),
        why="\n".join(failure_lines(launch_failures(records))),
    )


@pytest.mark.parametrize("way", WAYS)
def test_what_ended_it_is_named_wherever_people_read_of_it(died, way):
    script, code, text, cls = WAYS[way]
    environ = {"MY_TOKEN": "t0psecret"}
    environ |= {"RANK": "1", "WORLD_SIZE": "2"} if way == "rank" else {}
    end = died(script, code, environ=environ, kernel=way == "kernel")

    assert re.search(text, end.cause.text), end.cause
    assert end.cause.cls == cls
    assert end.cause.text in end.console
    assert end.webhook["verdict"].startswith(end.cause.text)
    assert end.cause.title in end.console
    assert end.bundle[0]["type"] == end.cause.type and end.bundle[0]["line"] == end.cause.line
    assert end.cause.text in end.why
    assert "t0psecret" not in json.dumps(vars(end), default=str)


def test_a_record_is_taken_once_and_nothing_in_it_is_trusted(records, tmp_path):
    good = {"pid": 7, "type": "E", "message": "\x1b[31mred\x07", "line": "4", "rank": [1]}
    texts = [json.dumps(good), "[]", "{", json.dumps({"ranks": [None, {"code": "x"}]}), "\0" * 99]
    for number, text in enumerate(texts):
        (tmp_path / f"failure.7.{number}.json").write_text(text)
    first, second = records.on_exit(1, 0, 1, {}), records.on_exit(1, 0, 1, {})
    again = records_in(tmp_path, [notice.data["record"] for notice in first])

    assert [notice.message for notice in first] == ["E: [31mred", ""]
    assert (second, again.on_exit(1, 0, 1, {})) == ([], [])


def test_the_last_message_of_a_rank_stands_in_for_a_record(records):
    ends = {4242: (1, 1, "OSError: [Errno 28] No space left on device (train.py:41)")}
    (notice,) = records.on_exit(4242, 1, 1, ends)

    assert notice.message == "OSError: [Errno 28] No space left on device at train.py:41 (rank 1)"
    assert notice.data["cls"] == "disk-full"

    (notice,) = records.on_exit(1, -2, 1, {4243: (0, -2, "KeyboardInterrupt (train.py:41)")})
    assert notice.message == "KeyboardInterrupt at train.py:41"


FULL_DISK = OSError(28, "No space left on device")
ROW, TARGET = "index out of range in self", "Target -3 is out of bounds."
WATCHDOG = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"
STALE = "Stale file handle"
FROM_FULL_DISK = "7 (from OSError: [Errno 28"


@pytest.mark.parametrize(
    ("error", "links", "text", "cls"),
    [
        (RuntimeError("gone"), {"__cause__": KeyError("killed")}, "gone (from KeyError: 'kill", ""),
        (ValueError("pos 7"), {"__context__": FULL_DISK}, FROM_FULL_DISK, "disk-full"),
        (OSError("pos 7"), {"__context__": FULL_DISK}, FROM_FULL_DISK, "disk-full"),
        (OSError("x"), {"__context__": FULL_DISK, "__suppress_context__": True}, "OSError: x", ""),
        (OSError("x"), {"__context__": KeyError("row")}, "OSError: x", ""),
        (IndexError(ROW), {}, f"IndexError: {ROW}", "token-ids"),
        (IndexError(TARGET), {}, f"IndexError: {TARGET}", "token-ids"),
        (IndexError("pop from a"), {}, "IndexError: pop from a", "data-error"),
        (AssertionError(3), {}, "AssertionError: 3", "assertion"),
        (TypeError("unsupported"), {}, "TypeError: unsupported", "user-error"),
        (RuntimeError(WATCHDOG), {}, f"RuntimeError: {WATCHDOG}", "nccl-timeout"),
        (OSError(116, STALE), {}, f"OSError: [Errno 116] {STALE}", "file-system"),
    ],
)
def test_an_error_is_classified_with_the_one_behind_it(error, links, text, cls):
    """Torch's end of a file on a full disk hides why. What was handled on purpose explains none."""
    for name, value in links.items():
        setattr(error, name, value)
    record = failure.record_error(error)
    found = Failure(type=record["type"], message=record["message"])

    assert text in found.text and ("from" in text or found.text == text)
    assert classify_failure(found, failure_classes()).cls == cls


@pytest.mark.parametrize(("bytes_", "text"), [(1 << 62, ": 'ckpt.pt'"), (0, "pos 7")])
def test_a_full_disk_that_torch_hides_is_named(monkeypatch, bytes_, text):
    monkeypatch.setattr(failure, "FULL_BYTES", bytes_)
    module = {"__name__": "torch.serialization"}
    exec("def save(f):\n    raise RuntimeError('inline_container.cc: pos 7')\n", module)
    with pytest.raises(RuntimeError) as caught:
        module["save"]("ckpt.pt")
    found = failure.record_error(caught.value)["message"]

    assert found.endswith(text) and ("No space left on device" in found) == bool(bytes_)


def test_a_signal_that_a_shell_reports_is_one(records):
    """Of the rank that recorded no end; a code of the job's own is none, nor is one above 192."""
    (notice,) = records.on_exit(77, 137, 1, {4242: (0, None, ""), 4243: (1, 0, "")})
    found = (notice.data["type"], notice.data["pid"], notice.data["cls"])
    assert found == ("SIGKILL", 4242, "killed")
    assert notice.message == "SIGKILL (rank 0)"
    assert [records.on_exit(77, code, 1, {}) for code in (130, 143, 255, 3)] == [[], [], [], []]
    records.on_launch()
    (notice,) = records.on_exit(78, 139, 1, {})
    assert notice.message == "SIGSEGV"


def test_a_rank_that_crashed_is_shown_with_its_place(records, tmp_path):
    rank = {"rank": 1, "pid": 4243, "code": -11}
    record = {"kind": "launcher", "type": "ChildFailedError", "pid": 7, "ranks": [rank]}
    (tmp_path / "failure.7.1.json").write_text(json.dumps(record))
    dump = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):"
    (tmp_path / "boot.4243").write_text(f'{dump}\n  File "train.py", line 7 in step\n')
    texts = [notice.message for notice in records.on_exit(7, 1, 1, {})]

    assert texts == ["ChildFailedError", "SIGSEGV at train.py:7 (rank 1)"]


def test_an_end_without_a_record_is_what_it_was(died):
    with pytest.raises(FileNotFoundError):
        died("import os\nos._exit(3)", 3)


LEFT = """
import faulthandler, sys, threading
faulthandler.enable()
sys.excepthook = lambda *error: print("mine", error[1], file=sys.stderr)
assert threading.excepthook is threading.__excepthook__
raise RuntimeError("boom")
"""


def test_the_job_keeps_its_faulthandler_hooks_streams_and_code(launch):
    assert launch(LEFT, code=1).err == "mine boom\n"

    crash = "import faulthandler, ctypes\nfaulthandler.enable()\nctypes.string_at(0)\n"
    job = launch(crash, code=-signal.SIGSEGV)
    assert job.err.startswith("Fatal Python error") and job.marks["boot"] == ""


# ── which counters of the kernel are read, and what of them is ours ───────────────────────────────


@pytest.mark.parametrize(
    ("membership", "place"),
    [
        ("0::/slurm/job_1\n", "slurm/job_1/memory.events"),
        ("0::/../../elsewhere\n", "memory.events"),  # a container sees only its own root
        ("3:cpu:/a\n5:memory,x:/b\n0::/\n", "memory/b/memory.oom_control"),
        ("nonsense\n", None),
    ],
)
def test_the_file_of_our_cgroup(tmp_path, membership, place):
    (tmp_path / "cgroup").write_text(membership)
    root = tmp_path / "fs"
    if place is not None:
        (root / place).parent.mkdir(parents=True)
        (root / place).write_text("oom_kill 1\n")

    found = group_file(tmp_path / "cgroup", root)
    assert found == (None if place is None else root / place)


def test_only_what_grew_since_the_launch_counts(tmp_path):
    group, kernel = tmp_path / "memory.events", tmp_path / "vmstat"
    group.write_text("low 0\noom_kill 7\n")
    kernel.write_text("pgfault 1\noom_kill 9\n")
    counters = OomCounters(group, kernel)
    group.write_text("low 0\noom_kill 8\n")
    counters.start()
    assert counters.describe_kills() == ""
    kernel.write_text("oom_kill 10\n")
    assert counters.describe_kills().endswith("ended 1 process of this machine")
    group.write_text("oom_kill 10\n")
    assert counters.describe_kills().endswith("ended 2 processes of this cgroup")
    group.write_text("oom_kill x\n")
    kernel.unlink()
    assert counters.describe_kills() == ""
