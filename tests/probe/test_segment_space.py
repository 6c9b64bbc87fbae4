"""A full /dev/shm harms nobody, and the hot path asks nothing of the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from supervise_probe.ipc.segment import Writer


@pytest.fixture
def small_shm(tmp_path):
    """A tmpfs of 8 MB; skips where mounting is not permitted."""
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def run(source: str, *argv: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(source), *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_full_shm_is_an_error_before_a_segment_is_allocated_and_none_afterwards(small_shm):
    """One that does not fit leaves no file. The space of one that does is its own: the job fills
    /dev/shm to the last page, and every slot can be written; with a sparse file the first store
    into a new page would be SIGBUS."""
    done = run(
        """
        import errno, os, sys
        from supervise_probe.ipc.segment import Writer
        try:
            Writer.create(sys.argv[1], "run", 0, 1, slots=100_000)
        except OSError as error:
            print(errno.errorcode[error.errno], os.listdir(sys.argv[1]))
        writer = Writer.create(sys.argv[1], "run", 0, 1, slots=8192, capacity=64)
        try:
            with open(sys.argv[1] + "/dataset", "wb", buffering=0) as hog:
                while True:
                    hog.write(bytes(4096))
        except OSError as error:
            print(errno.errorcode[error.errno])
        writer.announce([f"m{i}" for i in range(64)])
        for step in range(20_000):
            writer.publish(step, 0, [1.0] * 64, step)
        writer.write_status({"tier": "T1"})
        print("trained")
        """,
        small_shm,
    )

    assert (done.returncode, done.stdout) == (0, "ENOSPC []\nENOSPC\ntrained\n"), done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")
def test_no_segment_is_made_in_a_directory_of_another_user(tmp_path):
    """Who owns it could put another file in its place, and command the job."""
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(OSError, match="it belongs to user 65534"):
        Writer.create(str(tmp_path), "run", 0, 1, slots=8)
    assert list(tmp_path.iterdir()) == []


def test_publishing_and_listening_need_no_system_call(tmp_path):
    """Under strict seccomp, where any call but read and write kills the process, both go on."""
    done = run(
        """
        import ctypes, os, sys
        from supervise_probe.ipc.segment import Mailbox, Writer
        writer = Writer.create(sys.argv[1], "run", 0, 1, slots=64, capacity=64)
        mailbox = Mailbox(writer)
        writer.announce([f"m{i}" for i in range(64)])
        dense = [0.5] * 64
        sparse = [0.5] * 63 + [None]
        writer.publish(0, 0, sparse, 1)
        if ctypes.CDLL(None, use_errno=True).prctl(22, 1, 0, 0, 0):
            print("no seccomp")
            sys.exit(3)
        for step in range(1, 5000):
            writer.publish(step, 0, dense if step % 10 else sparse, step)
            writer.write_heartbeat(step, 1)
            mailbox.poll()
            writer.lease_until_ns()
        os.write(1, b"still here")
        os._exit(0)  # not permitted either: it ends with SIGKILL
        """,
        tmp_path,
    )

    if done.returncode == 3:
        pytest.skip("this kernel has no strict seccomp")
    assert done.stdout == "still here", (done.returncode, done.stderr)
