"""Process trees and signals, and files of other users."""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil
from world import Case, Skip, alive, eventually, scenario

# ── process trees ─────────────────────────────────────────────────────────────────────────────────


@scenario("processes")
def background_child(case: Case) -> None:
    """What a job leaves running in the background is the job's, and is left alone."""
    code, fresh = case.draw.randrange(60), case.draw.choice([True, False])
    body = f"subprocess.Popen(['sleep', '25'], start_new_session={fresh})"
    case.start(job=case.plain(body, code))
    case.ends(code)
    assert any("sleep" in p.info["cmdline"] for p in case.processes()), "it was killed"
    case.clean(besides=["sleep"])
    case.readable()


@scenario("processes")
def exec_chain(case: Case) -> None:
    """Programs that become others."""
    code = case.draw.randrange(60)
    last = case.plain("", code, name="last.py")
    words = ["env", "A=1", "nice", "sh", "-c", 'exec "$0" "$@"', *last]
    case.start(job=words[case.draw.choice([0, 2, 3]) :])
    case.fine(code)


# ── signals ───────────────────────────────────────────────────────────────────────────────────────

WAITING = "time.sleep(0.05)\n" * 40
NAMES = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2")


def _drawn(case: Case) -> signal.Signals:
    return signal.Signals[f"SIG{case.draw.choice(NAMES)}"]


@scenario("signals")
def storm(case: Case) -> None:
    """Hundreds of signals in a burst end nothing that they would not end without us."""
    signums = [*map(int, (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGWINCH))]
    ignore = f"for n in {signums}: signal.signal(n, lambda *_: None)"
    watcher = case.start(job=case.plain(f"{ignore}\nopen('up', 'w')\n{WAITING}", 5))
    case.ready()
    for _ in range(case.draw.randrange(100, 500)):
        watcher.send_signal(case.draw.choice(signums))
        time.sleep(case.draw.choice([0, 0, 0.001]))
    case.fine(5)


@scenario("signals", seeds=36)
def term_at_the_start(case: Case) -> None:
    """TERM while we start: the job was not started, or it got it; nothing is left."""
    watcher = case.start(job=case.plain("time.sleep(60)"))
    time.sleep(case.draw.uniform(0, 1.5))
    watcher.send_signal(signal.SIGTERM)
    case.ends((143, -signal.SIGTERM), done=False)
    case.clean()


@scenario("signals", seeds=36)
def signals_at_the_end(case: Case) -> None:
    """Second signals, while we end: neither the code nor the last record is lost."""
    code = case.draw.randrange(60)
    body = (
        f"signal.signal(15, lambda *_: (time.sleep({case.draw.uniform(0, 0.5)}),"
        f" os._exit({code})))\nopen('up', 'w')\ntime.sleep(60)"
    )
    watcher = case.start(job=case.plain(body))
    case.ready()
    watcher.send_signal(signal.SIGTERM)
    eventually(lambda: not alive(case.up()), "its end")
    signum, pause = _drawn(case), case.draw.choice([0.002, 0.01, 0.03, 0.1])
    while watcher.poll() is None:
        watcher.send_signal(signum)
        time.sleep(pause)
    case.fine(code, done=False)
    assert case.records("run_end"), "the last record is missing"


@scenario("signals", seeds=16)
def watcher_is_killed_in_the_start(case: Case) -> None:
    """kill -9 at any time of the first second and a half: the job, if there is one, runs on."""
    watcher = case.start(job=case.plain("time.sleep(2)"))
    time.sleep(case.draw.uniform(0.2, 1.5))
    watcher.kill()
    watcher.wait()
    time.sleep(0.5)
    if case.job_pid:
        eventually(lambda: case.text("done"), "the job's end", 20)
    assert case.text("done") == ("x" if case.job_pid else "")


@scenario("signals")
def dispositions(case: Case) -> None:
    """What a job inherits is what it inherits without us: signals, limits, mask, niceness.

    Not SIGPIPE and SIGCHLD: Python ignores the one for itself, and we need the other.
    """
    ignored = case.draw.sample([1, 2, 3, 10, 12, 14], 2)
    mask, nice = case.draw.choice([0o22, 0o77, 0]), case.draw.choice([0, 3])
    blocked = case.draw.sample([1, 10, 12, 15], 1)

    def before() -> None:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        os.umask(mask)
        os.nice(nice)

    program = (
        "grep -E '^(Sig(Blk|Ign)|Umask|NoNewPrivs|CapEff)' /proc/self/status; nice; pwd; "
        "ls /proc/self/fd | wc -l; cat /proc/self/limits; cat /proc/self/oom_score_adj"
    )
    job = ["sh", "-c", program]
    code = case.bare(job, preexec_fn=before)
    case.start("-q", job=job, preexec_fn=before)
    case.follow = list
    case.fine(code, done=False)
    ours, bare = (case.text(name) for name in ("stdout", "bare.stdout"))
    ours = ours.replace("SigIgn:\t000000018", "SigIgn:\t000000000")  # 32 and 33 are glibc's
    assert ours == bare, set(ours.splitlines()) ^ set(bare.splitlines())


# ── hostile ──────────────────────────────────────────────────────────────────────────────────────

NOBODY = 65534


@scenario("hostile", seeds=16)
def run_of_another_user(case: Case) -> None:
    """Root does not take over what another user wrote, in whole or in part; nothing is touched."""
    if os.getuid():
        raise Skip("needs root, to be another user")
    body = "open('up', 'w')\nwhile not os.path.exists('leave'): time.sleep(0.05)"
    watcher = case.start(job=case.plain(body, 5))
    case.ready()
    eventually((case.run / "launch.json").exists, "the record of the launch")
    watcher.kill()
    watcher.wait()
    paths = [case.run, *case.run.rglob("*")]
    some = case.draw.choice([paths, [case.run / "probe.json"], [case.run / "launch.json"]])
    for path in some:
        os.chown(path, NOBODY, NOBODY)
    done = case.call("adopt", case.run)
    assert done.returncode == 64 and "belongs to user" in done.stderr, done.stderr
    assert alive(case.job_pid), "the job was ended"
    for path in some:
        os.chown(path, 0, 0)
    (case.home / "leave").touch()
    done = case.call("adopt", case.run)
    assert done.returncode in (5, 255), done.stderr
    case.clean()


@scenario("hostile", seeds=2)
def killed_backtest(case: Case) -> None:
    """Its workers end with it."""
    for name in ("a.csv", "b.csv"):
        rows = "".join(f"{step},2.0\n" for step in range(200_000))
        (case.home / name).write_text(f"step,loss\n{rows}")
    words = ["backtest", "--policy", "nano", "--jobs", "2", "a.csv", "b.csv"]
    parent = case.popen([sys.executable, "-m", "supervise", *words])
    known = psutil.Process(parent.pid)
    eventually(lambda: len(known.children(recursive=True)) >= 2, "its workers")
    time.sleep(case.draw.uniform(0, 2))
    workers = known.children(recursive=True)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    eventually(lambda: not any(alive(worker.pid) for worker in workers), "the end of its workers")


@scenario("the driver", seeds=0)
def always_fails(case: Case) -> None:
    """Shows what a failure looks like."""
    case.start(job=case.plain("", 7))
    case.fine(8)
