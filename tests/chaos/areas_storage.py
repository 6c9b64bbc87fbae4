"""Disks under the run directory, which are full, slow or take half of a write; shared memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

from world import Case, Skip, eventually, scenario

# Makes the disk below CHAOS_DISK slow, or lets a part of each write through, and logs each sync
# and the start of the job.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
static int ours(int fd) {
    char link[64], path[4096];
    const char *disk = getenv("CHAOS_DISK");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = disk ? readlink(link, path, sizeof path - 1) : -1;
    if (size < 0) return 0;
    path[size] = 0;
    return strncmp(path, disk, strlen(disk)) == 0;
}
static void wait_for(const char *name) {
    const char *milliseconds = getenv(name);
    if (milliseconds) usleep(1000 * atoi(milliseconds));
}
static void note(const char *what) {
    const char *log = getenv("CHAOS_LOG");
    int fd = log ? open(log, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
    if (fd < 0) return;
    syscall(SYS_write, fd, what, strlen(what));
    close(fd);
}
ssize_t write(int fd, const void *data, size_t size) {
    if (fd > 2 && ours(fd)) {
        const char *most = getenv("CHAOS_SHORT");
        wait_for("CHAOS_WRITE_MS");
        if (most && size > (size_t)atoi(most)) size = atoi(most);
    }
    return syscall(SYS_write, fd, data, size);
}
static int slow_sync(int number, int fd) {
    if (ours(fd)) { note("sync\n"); wait_for("CHAOS_SYNC_MS"); }
    return syscall(number, fd);
}
int fsync(int fd) { return slow_sync(SYS_fsync, fd); }
int fdatasync(int fd) { return slow_sync(SYS_fdatasync, fd); }
int posix_spawnp(pid_t *pid, const char *file, const posix_spawn_file_actions_t *actions,
                 const posix_spawnattr_t *attributes, char *const argv[], char *const envp[]) {
    int (*real)(pid_t *, const char *, const posix_spawn_file_actions_t *,
                const posix_spawnattr_t *, char *const[], char *const[]);
    real = dlsym(RTLD_NEXT, "posix_spawnp");
    note("job\n");
    return real(pid, file, actions, attributes, argv, envp);
}
"""
MOST_SYNCS = 3  # before the job starts

# ── disks ─────────────────────────────────────────────────────────────────────────────────────────


def fill(path: Path) -> Path:
    """Write until there is no room for one more byte."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    return path


@scenario("disks", seeds=10)
def small_disk(case: Case) -> None:
    """The run directory's disk has room for some records, or for hardly any."""
    disk = case.tmpfs("disk", f"size={case.draw.choice([200, 300, 400, 1000, 2000])}k")
    case.run = disk / "run"
    job, code = case.job(2.0)
    case.start("--policy", "nano", job=job)
    case.survived(code)


@scenario("disks", seeds=16)
def disk_fills_up(case: Case) -> None:
    """Another program fills the disk in the middle; perhaps there is room again later."""
    disk = case.tmpfs("disk", "size=4m")
    case.run = disk / "run"
    job, code = case.job(4.0)
    case.start("--policy", "nano", job=job)
    case.up()
    time.sleep(case.draw.uniform(0, 2))
    filler = fill(disk / "filler")
    if case.draw.random() < 0.5:
        time.sleep(case.draw.uniform(0.2, 2))
        filler.unlink()
    case.survived(code)


@scenario("disks", seeds=4)
def few_inodes(case: Case) -> None:
    """No more files can be made."""
    disk = case.tmpfs("disk", f"size=8m,nr_inodes={case.draw.randrange(8, 30)}")
    case.run = disk / "run"
    job, code = case.job(2.0)
    case.start("--policy", "nano", job=job)
    case.ends((code, 64), done=None)
    case.clean()
    if case.watcher is not None and case.watcher.returncode == code:
        case.readable(replay=(0, 2), verify=(0, 2))


@scenario("disks", seeds=10)
def becomes_immutable(case: Case) -> None:
    """Nothing in the run directory can be written any more."""
    job, code = case.job(3.0)
    case.start("--policy", "nano", job=job)
    case.up()
    time.sleep(case.draw.uniform(0, 1.5))
    locked = subprocess.run(["chattr", "-R", "+i", str(case.run)], capture_output=True, text=True)
    if locked.returncode:
        raise Skip(f"chattr +i is not permitted here: {locked.stderr.strip()[:80]}")
    case.survived(code)


@scenario("disks", seeds=6)
def run_directory_removed(case: Case) -> None:
    """All of the run directory is removed, or moved away, in the middle."""
    job, code = case.job(4.0)
    case.start("--policy", "nano", job=job)
    case.up()
    time.sleep(case.draw.uniform(0, 2))
    if case.draw.random() < 0.5:
        shutil.rmtree(case.run, ignore_errors=True)
    else:
        case.run.rename(case.home / "away")
    case.ends(code, done=None)
    assert case.text("done") or case.text("result"), "the job did not come to its end"
    case.clean()


PLACES = ("control/1-1.json", "control/0-0.json", "probe/x.json", "relaunch/1.json")
PLACES += ("quarantine.json", "checkpoints.json", "state.json", "state.json.part", "launch.json")


def plant(case: Case, path: Path) -> None:
    """Put something there that blocks or misleads who opens it."""
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        return
    path.unlink(missing_ok=True)
    what = case.draw.choice(["fifo", "folder", "zero", "loop", "garbage", "huge"])
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "garbage":
        path.write_bytes(case.draw.randbytes(5000))
    elif what == "huge":
        path.touch()
        os.truncate(path, 1 << 33)
    else:
        path.symlink_to("/dev/zero" if what == "zero" else path.name)


@scenario("disks", seeds=30)
def planted_in_the_run(case: Case) -> None:
    """A FIFO, a folder, a link or garbage in the run directory blocks nobody."""
    code = case.draw.randrange(60)
    case.start("--policy", "nano", job=case.train(200, sleep=0.02, exit=code))
    case.steps(5)
    for place in case.draw.sample(PLACES, 2):
        plant(case, case.run / place)
    time.sleep(1.0)
    if case.draw.random() < 0.5:
        with contextlib.suppress(subprocess.TimeoutExpired):
            case.call("status", case.run, within_s=10)
    case.survived(code, verify=(0,))


# ── slow and stingy disks ─────────────────────────────────────────────────────────────────────────


@scenario("slow disks", seeds=60)
def slow_disk(case: Case) -> None:
    """Each write and each sync takes long: the job starts in time, and we end soon after it."""
    write, sync = case.draw.choice([0, 5, 50, 400, 1500]), case.draw.choice([0, 20, 300, 3000])
    log = case.home / "syncs"
    settings = {"CHAOS_WRITE_MS": write, "CHAOS_SYNC_MS": sync, "CHAOS_LOG": log}
    case.preload(SHIM, CHAOS_DISK=case.run, **settings)
    job, code = case.job(case.draw.uniform(0.2, 2))
    case.start("--policy", "nano", job=job)
    case.ends(code, done=None)
    if "does not answer" in case.said() or "is too slow" in case.said():  # told how to complete it
        case.env = {name: value for name, value in case.env.items() if name != "LD_PRELOAD"}
        case.call("adopt", case.run)
    case.clean()
    case.readable(replay=(0, 2), verify=(0, 2))
    before = case.text("syncs").partition("job\n")[0].count("sync")
    assert before <= MOST_SYNCS, f"{before} syncs before the start of the job"


@scenario("slow disks", seeds=32)
def short_writes(case: Case) -> None:
    """A write takes a part of what it is given: the rest follows, and the record is whole."""
    case.preload(SHIM, CHAOS_DISK=case.run, CHAOS_SHORT=case.draw.choice([1, 7, 64, 500, 4096]))
    job, code = case.job(case.draw.uniform(0.2, 2))
    case.start("--policy", "nano", job=job)
    case.ends(code, done=None)
    case.clean()
    case.readable()
    assert not case.records("note", "journal-incomplete")


# ── full disks ────────────────────────────────────────────────────────────────────────────────────


@scenario("full disks", seeds=16)
def space_comes_back(case: Case) -> None:
    """The disk is full, and has space again: the record has no gap, and both are on it."""
    case.run = case.tmpfs("disk", "size=24m") / "run"
    case.start("--policy", "nano", job=case.train(300, sleep=0.03, exit=3))
    case.steps(5)
    filler = fill(case.run.parent / "filler")
    eventually(lambda: case.records("note", "record-space-short"), "the message")
    filler.unlink()
    eventually(lambda: case.records("note", "record-space-enough"), "its end")
    case.unharmed(3)


# ── shared memory ─────────────────────────────────────────────────────────────────────────────────


def _folder(case: Case) -> Path:
    """Wait for the run's directory in shared memory."""
    return Path(eventually(lambda: next(iter(case.shm.glob("supervise-*")), None), "its directory"))


@scenario("shared memory", seeds=36)
def planted_in_shared_memory(case: Case) -> None:
    """A FIFO, a folder, a link or garbage among the segments blocks nobody."""
    code, early = case.draw.randrange(60), case.draw.random() < 0.5
    case.start("--policy", "nano", job=case.train(150, sleep=0.02, exit=code))
    folder = _folder(case)
    if not early:
        case.steps(5)
    names = ["rank-0.1.seg", "rank-7.77.seg", "rank-1.1.1.seg", "rank-x.seg"]
    for name in case.draw.sample([*names, "job.1", "owner", "supervise"], 3):
        plant(case, folder / name)
    case.unharmed(code)


@scenario("shared memory", seeds=10)
def planted_beside_it(case: Case) -> None:
    """What others left in shared memory under our names blocks no start."""
    for number in range(3):
        path = case.shm / f"supervise-{os.getuid()}-{number}"
        if case.draw.random() < 0.5:
            plant(case, path)
        else:
            path.mkdir()
            plant(case, path / case.draw.choice(["owner", "rank-0.1.seg", "job.1"]))
            os.utime(path, (1, 1))
    case.start(job=case.plain("time.sleep(0.3)", 5))
    case.ends(5)
    shutil.rmtree(case.shm)
    case.clean()
    case.readable()


@scenario("shared memory", seeds=10)
def little_shared_memory(case: Case) -> None:
    """It is full, or nearly: the probe stays off, or holds fewer frames."""
    case.shm.rmdir()
    case.shm = case.tmpfs("shm", f"size={case.draw.choice([4, 16, 64, 200, 400, 1000, 4000])}k")
    case.env["SUPERVISE_SHM"] = str(case.shm)
    if case.draw.random() < 0.4:
        fill(case.shm / "filler")
    case.start("--policy", "nano", job=case.train(60, sleep=0.01, exit=3))
    (case.shm / "filler").unlink(missing_ok=True) if case.draw.random() < 0.5 else case.up()
    case.ends(3, done=None)
    (case.shm / "filler").unlink(missing_ok=True)
    case.unharmed(3)


@scenario("shared memory", seeds=6)
def odd_shared_memory(case: Case) -> None:
    """SUPERVISE_SHM names nothing, a file, or a folder that is read-only."""
    kind = case.draw.choice(["nothing", "file", "read-only"])
    if kind == "file":
        (case.home / "shm").touch()
    case.env["SUPERVISE_SHM"] = str(case.home / "shm")
    if kind == "read-only":
        case.env["SUPERVISE_SHM"] = str(case.tmpfs("shm", "size=1m,ro"))
    case.start("--policy", "nano", job=case.train(60, sleep=0.01, exit=3))
    case.unharmed(3)


@scenario("shared memory", seeds=16)
def removed_shared_memory(case: Case) -> None:
    """A cleaner removes the segments, or all of the directory."""
    case.start("--policy", "nano", job=case.train(200, sleep=0.02, exit=3))
    folder = _folder(case)
    if case.draw.random() < 0.7:
        case.steps(case.draw.randrange(2, 60))
    if case.draw.random() < 0.5:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
    case.unharmed(3)


@scenario("shared memory", seeds=20)
def corrupted_segment(case: Case) -> None:
    """Bytes of the ring are not what the probe wrote: they are skipped or told, never acted on.

    The header, 4 KiB, is left alone: orders to the job lie there. A segment that is cut short is
    left out: whoever touches such memory is killed by the kernel, and nobody cuts it by accident.
    """
    case.start("--policy", "nano", job=case.train(200, sleep=0.02, exit=3))
    case.steps(10)
    for path in _folder(case).glob("rank-*.seg"):
        size = path.stat().st_size
        with path.open("r+b", buffering=0) as file:
            for _ in range(case.draw.randrange(1, 200)):
                file.seek(case.draw.randrange(size // 2, size))
                file.write(case.draw.randbytes(case.draw.choice([1, 8, 64])))
    case.survived(3, verify=(0,))
