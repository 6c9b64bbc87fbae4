import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from supervise.errors import StoreError, TamperError
from supervise.store import Chain, is_locked, read_audit, verify_audit

from .conftest import file_limit


def test_a_record_carries_what_an_auditor_asks_for(tmp_path, opened):
    """Who, when (two clocks, boot), where in the run, why; and the fields of the caller."""
    log = opened(tmp_path / "audit.log")
    body = {"attempt": 0, "event": 7, "reason": "why", "incident": None}
    data = {"z": float("inf")}

    seq = log.append(
        "rule", actor="engine", at_ns=9, wall="now", step=4, body={**body, "data": data}, sync=False
    )

    (stored,) = read_audit(tmp_path / "audit.log")
    assert seq == 0
    assert len(stored.pop("prev")) == 64
    assert stored.pop("boot")
    assert stored == {
        "v": 1,
        "seq": 0,
        "run": "run-1",
        "epoch": 1,
        "mono_ns": 9,
        "wall": "now",
        "step": 4,
        "kind": "rule",
        "actor": "engine",
        **body,
        "data": {"z": "+Inf"},
    }
    with pytest.raises(ValueError, match="seq"):
        log.append("rule", actor="x", at_ns=0, wall="", step=0, body={"seq": 1}, sync=False)


def test_a_log_of_another_version_is_neither_read_nor_called_changed(tmp_path):
    """Its digests are good; what its fields mean is not known here."""
    (tmp_path / "audit.log").write_bytes(
        Chain("run-1").line({"v": 2, "seq": 0, "prev": "", "run": "run-1", "epoch": 1})
    )

    for act in (read_audit, verify_audit):
        with pytest.raises(StoreError, match=r"is of version 2; this is supervise \d") as caught:
            list(act(tmp_path / "audit.log"))
        assert not isinstance(caught.value, TamperError)


def test_each_writer_is_an_epoch_and_the_chain_goes_on(tmp_path, opened, put):
    """A new supervisor continues the log of the one before; a message has "size head" of it."""
    path = tmp_path / "audit.log"
    for _ in range(3):
        log = opened(path)
        put(log, sync=True)
        put(log)
        head = log.head
        log.close()

    assert [(r["seq"], r["epoch"]) for r in read_audit(path)] == [(n, n // 2 + 1) for n in range(6)]
    report = verify_audit(path, "run-1")
    assert (report.exit_code, report.records, report.head) == (0, *head)
    assert [p.name for p in tmp_path.iterdir()] == ["audit.log"]


def test_two_threads_may_write(tmp_path, opened, put):
    log = opened(tmp_path / "audit.log")
    threads = [
        threading.Thread(target=lambda: [put(log, sync=i % 20 == 0) for i in range(100)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert verify_audit(tmp_path / "audit.log").records == 400


@pytest.fixture
def write_notes(opened, put):
    """A function that adds so many notes to a log, and returns its bytes."""

    def write(path, count):
        log = opened(path)
        for number in range(count):
            put(log, number)
        log.close()
        return path.read_bytes()

    return write


def test_a_torn_tail_is_kept_aside_and_told(tmp_path, opened, write_notes):
    """Whatever prefix of the last record reached the disk, the log goes on from the one before."""
    whole = write_notes(tmp_path / "whole.log", 3)
    start = whole.rstrip(b"\n").rindex(b"\n") + 1

    for cut in (*range(start + 9, len(whole), 9), len(whole) - 1):
        path = tmp_path / f"{cut}.log"
        path.write_bytes(whole[:cut])
        opened(path).close()

        assert verify_audit(path).exit_code == 0
        *notes, recovered = read_audit(path)
        assert [r["reason"] for r in notes] == [0, 1]
        assert (recovered["kind"], recovered["epoch"]) == ("recovered", 2)
        assert recovered["data"]["bytes"] == cut - start
        assert (tmp_path / recovered["data"]["file"]).read_bytes() == whole[start:cut]


def test_a_crash_in_the_middle_of_a_repair_is_repaired(tmp_path, opened, write_notes):
    """Between the copy, the cut and the `recovered` record nothing gets lost or told twice."""
    path = tmp_path / "audit.log"
    whole = write_notes(path, 1)
    torn = tmp_path / f"audit.log.truncated-{len(whole)}"
    torn.write_bytes(b"half a rec")
    path.write_bytes(whole + b"half a rec")  # copied, not yet cut
    opened(path).close()

    assert torn.read_bytes() == b"half a rec"
    assert [r["kind"] for r in read_audit(path)] == ["note", "recovered"]

    path.write_bytes(whole)  # cut, not yet told
    opened(path).close()
    opened(path).close()
    assert [r["kind"] for r in read_audit(path)] == ["note", "recovered"]


def test_a_changed_record_is_never_repaired(tmp_path, opened, write_notes):
    path = tmp_path / "audit.log"
    changed = write_notes(path, 3).replace(b'"reason":1', b'"reason":8') + b"torn as well"
    path.write_bytes(changed)

    with pytest.raises(TamperError, match="record 1 ") as caught:
        opened(path)

    assert caught.value.seq == 1
    assert path.read_bytes() == changed
    assert not is_locked(path)


HOLDER = """
import sys, time
from pathlib import Path
from supervise.store import Audit
log = Audit.open(Path(sys.argv[1]), "run-1", at_ns=1, wall="w")
print("open", flush=True)
time.sleep(600)
"""


def test_a_second_supervisor_is_refused_until_the_first_is_gone(tmp_path, opened, put):
    path = tmp_path / "audit.log"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"open\n"
        assert is_locked(path)
        with pytest.raises(StoreError, match=f"is watched by process {holder.pid}"):
            opened(path)
    finally:
        holder.kill()
        holder.communicate()

    assert not is_locked(path)
    put(opened(path))


WRITER = """
import sys
from pathlib import Path
from supervise.store import Audit
log = Audit.open(Path(sys.argv[1]), "run-1", at_ns=1, wall="w")
for n in range(10**9):
    log.append("note", actor="app", at_ns=n, wall="w", step=n, body={"reason": "x" * (n % 999)},
               sync=n % 50 == 0)
    print(n, flush=True)
"""


@pytest.mark.slow
def test_kill_9_loses_no_record_whose_append_returned(tmp_path, write_notes):
    path = tmp_path / "audit.log"
    for stop_after in (1, 400):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE)
        before = verify_audit(path).records if path.exists() else 0
        said = [int(writer.stdout.readline()) for _ in range(stop_after)]
        writer.kill()
        said += [int(line) for line in writer.stdout.read().split(b"\n")[:-1]]
        writer.communicate()

        assert verify_audit(path).records - before - len(said) in (0, 1)
        write_notes(path, 1)
        assert verify_audit(path).exit_code == 0


def descriptor(path) -> int:
    found = [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists() and fd.samefile(path)]
    assert len(found) == 1
    return int(found[0].name)


def test_an_fsync_error_is_final(tmp_path, opened, put):
    path = tmp_path / "audit.log"
    log = opened(path)
    put(log, sync=True)
    ours, theirs = os.pipe()  # a file on which fdatasync fails
    os.dup2(theirs, descriptor(path))

    for sync in (True, False):
        with pytest.raises(StoreError, match="cannot be made durable"):
            put(log, kind="intent", sync=sync)
    assert log.trouble is not None and "cannot be made durable" in log.trouble
    os.close(ours)
    os.close(theirs)
    log.close()


def test_a_short_write_leaves_no_half_record(tmp_path, opened, put):
    log = opened(tmp_path / "audit.log")
    with file_limit(5000):
        with pytest.raises(StoreError, match="cannot be written"):  # noqa: PT012
            while True:
                put(log, sync=True)
        log.close()

    report = verify_audit(tmp_path / "audit.log")
    assert (report.status, report.records) == ("good", log.head[0]) and log.trouble


FULL_DISK = """
import json, sys
from pathlib import Path
from supervise.errors import StoreError
from supervise.store import Audit, read_audit, verify_audit
path = Path(sys.argv[1]) / "audit.log"
log = Audit.open(path, "run-1", at_ns=1, wall="w")
hog = open(path.with_name("hog"), "wb", buffering=0)
for size in (65536, 4096):
    try:
        while hog.write(bytes(size)) == size:
            pass
    except OSError:
        pass
before = log.trouble
while log.trouble is None:
    last = log.append("note", actor="app", at_ns=1, wall="w", step=1, body={}, sync=False)
kinds = [r["kind"] for r in read_audit(path)]
try:
    while True:
        log.append("note", actor="app", at_ns=1, wall="w", step=1, body={"x": "y" * 9999},
                   sync=False)
except StoreError as error:
    told = str(error)
log.close()
print(json.dumps([before, kinds[-2:], last == len(kinds) - 2, told, verify_audit(path).status]))
"""


@pytest.mark.slow
def test_a_full_disk_is_told_from_the_reserve(tmp_path):
    """The record that met the full disk is kept, `disk_full` after it, and then no more lies."""
    mount = 'mount -t tmpfs -o size=3m none "$1" && exec "$2" -c "$3" "$1"'
    place = ["unshare", "-rm", "sh", "-c", mount, "sh", str(tmp_path), sys.executable]
    if subprocess.run([*place, "pass"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")

    done = subprocess.run([*place, FULL_DISK], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    before, kinds, kept, told, status = json.loads(done.stdout)
    assert (before, kinds, kept) == (None, ["note", "disk_full"], True)
    assert "No space left" in told
    assert status == "good"


def test_without_a_thread_each_record_is_committed_by_who_writes_it(
    tmp_path, opened, put, no_threads
):
    log = opened(tmp_path / "audit.log")
    put(log)
    log.close()

    assert verify_audit(tmp_path / "audit.log").exit_code == 0 and log.trouble is None
