"""Disks that are full, slow or take half of what is written."""

from __future__ import annotations

import subprocess

from areas_storage import fill
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
