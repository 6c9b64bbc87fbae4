"""Disks that are full, slow or take half of what is written; and memory and files that run out."""

from __future__ import annotations

import resource
import signal
import subprocess
import threading
import time

from areas_storage import fill
from world import Case, Skip, eventually, limit, scenario

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


def _shim(case: Case, **settings: int) -> None:
    """Put the shim before `supervise`, for the files of its run."""
    (case.home / "disk.c").write_text(SHIM)
    build = ["cc", "-shared", "-fPIC", "-O1", "-w", "-o", "disk.so", "disk.c", "-ldl"]
    try:
        subprocess.run(build, cwd=case.home, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        raise Skip("a slow disk needs a C compiler") from None
    case.env |= {
        "LD_PRELOAD": str(case.home / "disk.so"),
        "CHAOS_DISK": str(case.run),
        "CHAOS_LOG": str(case.home / "syncs"),
        **{f"CHAOS_{name}": str(value) for name, value in settings.items()},
    }


def _job(case: Case) -> tuple[list[str], int]:
    """A job that trains, or that waits; and its code."""
    code = case.draw.randrange(60)
    if case.draw.random() < 0.6:
        return case.train(case.draw.choice([40, 120]), sleep=0.01, exit=code), code
    return case.plain(f"time.sleep({case.draw.uniform(0, 2)})", code), code


# ── slow and stingy disks ─────────────────────────────────────────────────────────────────────────


@scenario("slow disks", seeds=48)
def slow_disk(case: Case) -> None:
    """Each write and each sync takes long: the job starts in time, and we end soon after it."""
    write, sync = case.draw.choice([0, 5, 50, 400, 1500]), case.draw.choice([0, 20, 300, 3000])
    _shim(case, WRITE_MS=write, SYNC_MS=sync)
    job, code = _job(case)
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
    _shim(case, SHORT=case.draw.choice([1, 7, 64, 500, 4096]))
    job, code = _job(case)
    case.start("--policy", "nano", job=job)
    case.ends(code, done=None)
    case.clean()
    case.readable()
    assert not case.records("note", "journal-incomplete")


# ── full disks ────────────────────────────────────────────────────────────────────────────────────


class _Filler(threading.Thread):
    """Takes each byte that becomes free, until it is told to stop."""

    def __init__(self, case: Case) -> None:
        super().__init__(daemon=True)
        self._disk, self._over = case.run.parent, threading.Event()

    def run(self) -> None:
        number = 0
        while not self._over.wait(0.02):
            fill(self._disk / f"filler-{number % 50}-{number}")
            number += 1

    def stop(self) -> None:
        self._over.set()
        self.join()


@scenario("full disks", seeds=40)
def full_disk_with_a_reserve(case: Case) -> None:
    """Somebody takes all space, once or for ever: people hear of it, and acting goes on."""
    case.run = case.tmpfs("disk", f"size={case.draw.choice([12, 24, 48])}m") / "run"
    drill = case.draw.choice(["lr_spike@80", "grad_nan@80"])
    case.start("--policy", "nano", "--drill", drill, job=case.train(160, sleep=0.02, exit=3))
    case.steps(case.draw.randrange(2, 40))
    filler = _Filler(case)
    filler.start()
    if case.draw.random() < 0.3:
        time.sleep(case.draw.uniform(0.5, 2))
        filler.stop()
    case.ends(3, done=None)
    filler.stop()
    case.clean()
    case.readable()
    assert "SEV1 no space is left for the record of this run" in case.said(), case.said()
    assert case.records("note", "record-space-short")
    assert not case.records("note", "unprotected")


@scenario("full disks", seeds=24)
def full_disk_without_a_reserve(case: Case) -> None:
    """There is hardly any reserve: that it is spent is told, and the job comes to its end."""
    case.run = case.tmpfs("disk", f"size={case.draw.choice([300, 400, 600])}k") / "run"
    (case.run.parent / "before").write_bytes(bytes(case.draw.choice([60, 120, 160]) << 10))
    case.start("--policy", "nano", job=case.train(700, sleep=0.01, exit=3))
    case.up()
    filler = _Filler(case)
    filler.start()
    case.ends(3, done=None)
    filler.stop()
    case.clean()
    case.readable(replay=(0, 2), verify=(0, 2))
    assert "SEV1 this run is not protected any more" in case.said(), case.said()


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


# ── memory and files ──────────────────────────────────────────────────────────────────────────────


@scenario("limits", seeds=32)
def memory_runs_out(case: Case) -> None:
    """RLIMIT_AS falls below what we use: signals reach the job, and we end with its code."""
    watcher = case.start("--policy", "nano", job=case.train(100_000, sleep=0.01))
    case.steps(case.draw.randrange(1, 60))
    most = case.draw.choice([1, 64, 256]) << 20
    resource.prlimit(watcher.pid, resource.RLIMIT_AS, (most, most))
    time.sleep(case.draw.uniform(0, 3))
    for _ in range(case.draw.choice([1, 3])):
        watcher.send_signal(signal.SIGTERM)
    case.ends(128 + signal.SIGTERM, done=False)


@scenario("limits", seeds=20)
def memory_is_short_from_the_start(case: Case) -> None:
    """RLIMIT_AS of few megabytes: the job runs, watched or not, and its code is ours."""
    most, code = case.draw.choice([64, 127, 200, 255, 256, 320, 500]) << 20, case.draw.randrange(60)
    body = f"time.sleep({case.draw.uniform(0, 1.5)})"
    case.start(job=case.plain(body, code), preexec_fn=limit(**{"as": most}))
    case.ends(code)
    assert (most < 256 << 20) == ("not watched: only" in case.said()), case.said()


@scenario("limits", seeds=20)
def very_few_files(case: Case) -> None:
    """RLIMIT_NOFILE of 7 to 14: the job runs as it does without us, and that is said."""
    most, code = case.draw.randrange(7, 15), case.draw.randrange(60)
    case.start(job=case.plain("time.sleep(0.2)", code), preexec_fn=limit(nofile=most))
    case.ends(code)
    assert "not watched: only" in case.said() and not case.run.exists(), case.said()
