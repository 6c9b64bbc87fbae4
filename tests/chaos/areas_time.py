"""Clocks, pauses, stalls and hangs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from world import Case, scenario

NANO = Path(__file__).parents[2] / "policies" / "nano.yaml"

# ── clocks ────────────────────────────────────────────────────────────────────────────────────────

# Moves the wall clock of one process tree by as many seconds as a file says; no other clock.
SHIM = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long moved(void) {
    char text[32] = {0};
    const char *path = getenv("CHAOS_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return 0;
    if (read(fd, text, 31) < 0) text[0] = 0;
    close(fd);
    return atol(text);
}
int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, at);
    if (id == CLOCK_REALTIME) at->tv_sec += moved();
    return code;
}
time_t time(time_t *out) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (out) *out = at.tv_sec;
    return at.tv_sec;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""
DAY = 86400


@scenario("clocks", seeds=20)
def wall_clock_jumps(case: Case) -> None:
    """The wall clock jumps, ahead or back, once or often: nothing is acted on."""
    clock, code = case.home / "by", case.draw.randrange(60)
    case.preload(SHIM, CHAOS_CLOCK=clock)
    case.start("--policy", "nano", job=case.train(250, sleep=0.02, exit=code))
    case.steps(10)
    for _ in range(case.draw.choice([1, 1, 5])):
        jump = case.draw.choice([-DAY, DAY, -3600, 3600, 400 * DAY, -20000 * DAY, -1, 121])
        clock.write_text(str(jump))
        time.sleep(case.draw.uniform(0.1, 1))
    case.unharmed(code)


# ── pauses ────────────────────────────────────────────────────────────────────────────────────────


@scenario("pauses", seeds=16)
def stopped_and_continued(case: Case) -> None:
    """Somebody stops the job, the supervisor or both for a while, and nothing is acted on."""
    watcher = case.start("--policy", "nano", job=case.train(300, sleep=0.02, exit=4))
    case.steps(case.draw.randrange(5, 50))
    job = case.job_pid
    pids = case.draw.choice([[watcher.pid], [job], [job, watcher.pid]])
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(case.draw.uniform(0.3, 6))
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    case.unharmed(4)


# ── liveness ──────────────────────────────────────────────────────────────────────────────────────

STALLS = (7, 9, 15, 30, 60, 121, 122, 130)
EVERY_S = 0.1  # a step sleeps so long, and uses a hundredth of a core
BEFORE, AFTER = 50, 250  # steps


def _limited(case: Case, seconds: float | None) -> str:
    """The policy nano, with another limit of silence."""
    text = NANO.read_text(encoding="utf-8")
    if seconds is not None:
        limit = f"  hang.stalled: {{after: {{min: {seconds:g}s, p99_multiple: 8}}}}\n"
        text = text.replace("override:\n", f"override:\n{limit}", 1)
    return case.policy(text)


def _enter(stall: int, short: bool) -> None:
    """Stalls within the limit, and such as end while the stop is under way (10 s of looking)."""
    limit = (6.0 if stall <= 15 else stall - 8.0) if short else None

    def run(case: Case) -> None:
        job = case.train(BEFORE + AFTER, sleep=EVERY_S, stall=f"{BEFORE}:{stall}", exit=4)
        case.patience_s = 120 + stall
        case.start("--policy", _limited(case, limit), job=job)
        case.fine(4, done=None)
        stops = [r for r in case.records("intent") if r["data"]["action"]["verb"] == "stop"]
        done = [r["reason"] for r in case.records("commit") if "stop" in r["reason"]]
        assert case.text("result") and not done, f"{len(stops)} stops asked for, done: {done}"

    run.__name__ = f"stall_{stall}s{'_short_limit' if short else ''}"
    scenario("liveness", seeds=3, idle=True)(run)


for _stall_s in STALLS:
    _enter(_stall_s, short=False)
    _enter(_stall_s, short=True)


@scenario("liveness", seeds=2, idle=True)
def hang_is_stopped_as_shipped(case: Case) -> None:
    """A job that stays hung is stopped, with the limit as shipped."""
    job = case.train(BEFORE + AFTER, sleep=EVERY_S, stall=f"{BEFORE}:ever")
    case.patience_s = 280
    case.start("--policy", _limited(case, None), job=job)
    case.fine(78, done=None)


@scenario("liveness", seeds=3, idle=True)
def hang_after_a_stall(case: Case) -> None:
    """A job that stood still once, went on, and then hangs is stopped."""
    then = "time.sleep(1e6)"
    job = case.train(900, sleep=EVERY_S, stall=f"{BEFORE}:9", at=BEFORE + 150, then=then)
    case.patience_s = 150
    case.start("--policy", _limited(case, 4.0), job=job)
    case.ends(78, done=None)
    case.clean()
    case.readable()


@scenario("liveness", seeds=2)
def busy_silence(case: Case) -> None:
    """A job that works without steps is never stopped."""
    spin = "end = time.time() + 40\nwhile time.time() < end: pass"
    job = case.train(100, sleep=0.05, at=BEFORE, then=spin, exit=4)
    case.start("--policy", _limited(case, 4.0), job=job)
    case.fine(4, done=None)
    assert case.text("result")
