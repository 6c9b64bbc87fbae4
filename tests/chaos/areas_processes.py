"""Process trees and signals."""

from __future__ import annotations

import os
import signal
import sys
import time

from world import JOBS, Case, alive, eventually, kill, scenario

LOOK = """\
version: supervise/v1
policy: look
mode: enforce
detectors: {any: {kind: threshold, metric: train_loss_raw, gt: 0.0}}
rules: [{id: any, when: any, sev: SEV1, run: look}]
runbooks: {look: {meaning: It trains., impact: None., steps: [snapshot]}}
budgets: {all: {max: 9, per: 1000}}
warmup: 5
"""


# ── process trees ─────────────────────────────────────────────────────────────────────────────────


@scenario("processes")
def setsid_command(case: Case) -> None:
    """`setsid CMD` under us is CMD: its end, its code."""
    code = case.draw.randrange(1, 60)
    job = case.plain(f"time.sleep({case.draw.uniform(0.2, 2)})", code)
    case.start(job=["setsid", *job])
    case.fine(code)


@scenario("processes")
def job_makes_a_session(case: Case) -> None:
    """A job may call os.setsid(), as it may without us."""
    code = case.draw.randrange(60)
    case.start(job=case.plain("os.setsid()", code))
    case.fine(code)


@scenario("processes")
def job_makes_a_group(case: Case) -> None:
    """A job that signals its own group hits itself and its children, not us."""
    signum = case.draw.choice(["TERM", "INT", "HUP", "KILL"])
    body = f"signal.signal(2, signal.SIG_DFL); os.killpg(os.getpgrp(), signal.SIG{signum})"
    case.start(job=case.plain(body))
    case.fine(128 + getattr(signal, f"SIG{signum}"), done=False)


@scenario("processes")
def many_children(case: Case) -> None:
    """Children and orphans that end in any order."""
    count, code = case.draw.randrange(5, 60), case.draw.randrange(60)
    body = (
        f"for n in range({count}):\n"
        "    if os.fork() == 0:\n"
        "        if n % 3 == 0 and os.fork(): os._exit(1)\n"
        "        time.sleep(n / 50); os._exit(n)\n"
        "while True:\n"
        "    try: os.wait()\n"
        "    except ChildProcessError: break"
    )
    case.start(job=case.plain(body, code))
    case.fine(code)


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


@scenario("processes")
def deep_tree(case: Case) -> None:
    """Shells in shells; the innermost code comes out."""
    code, depth = case.draw.randrange(60), case.draw.randrange(2, 12)
    job = case.plain("time.sleep(0.3)", code)
    for _ in range(depth):
        job = ["sh", "-c", '"$0" "$@"; exit $?', *job]
    case.start(job=job)
    case.fine(code)


@scenario("processes", seeds=6)
def ranks_outlive_the_first(case: Case) -> None:
    """The first process is killed, the ranks train on: they are watched, its code is the result."""
    signum = case.draw.choice([signal.SIGKILL, signal.SIGSEGV])
    steps, sleep = case.draw.randrange(60, 120), 0.05
    train = [sys.executable, str(JOBS / "train.py"), f"--steps={steps}", f"--sleep={sleep}"]
    body = (
        "ranks = []\n"
        "for rank in range(2):\n"
        "    os.mkdir(f'rank{rank}')\n"
        "    env = {**os.environ, 'RANK': str(rank), 'LOCAL_RANK': str(rank), 'WORLD_SIZE': '2'}\n"
        f"    subprocess.Popen({train}, cwd=f'rank{{rank}}', env=env, start_new_session=True)\n"
        "time.sleep(1000)"
    )
    case.start("--policy", "nano", job=case.plain(body))
    pids = [case.home / f"rank{rank}" / "pid" for rank in range(2)]
    eventually(lambda: all(path.exists() and path.read_text() for path in pids), "the ranks")
    case.follow = lambda: [int(path.read_text()) for path in pids]
    case.steps(20)
    kill(case.up(), signum)
    time.sleep(2.0)
    assert case.watcher is not None
    assert case.watcher.poll() is None, "it ended while the ranks trained on"
    case.ends(128 + signum, done=False)
    assert all((case.home / f"rank{rank}" / "result").exists() for rank in range(2))
    case.clean()
    case.readable()
    assert case.state()["step"] == steps - 1, "the ranks were not watched to their end"


@scenario("processes")
def no_double_dash(case: Case) -> None:
    """A job that does not stand behind `--` is refused, and not started."""
    words = case.draw.choice(
        [[], ["run"], ["-q"], ["--policy", "nano"], ["run", "--mode", "shadow"]]
    )
    job = case.plain()
    case.watcher = case.popen([sys.executable, "-m", "supervise", *words, *job])
    case.ends(64, done=False)
    case.clean()


def _evidence_asks(case: Case, does: str) -> None:
    """Insist that a git that does this, when evidence asks it, is ended with us."""
    (case.home / "bin").mkdir()
    git = case.home / "bin" / "git"
    deaf = case.draw.choice(["", "trap '' TERM INT HUP\n"])
    git.write_text(f"#!/bin/sh\n{deaf}touch {case.home}/asked\n{does}\n")
    git.chmod(0o755)
    case.env["PATH"] = f"{git.parent}:{case.env['PATH']}"
    case.start("--policy", case.policy(LOOK), job=case.train(400, sleep=0.01))
    eventually((case.home / "asked").exists, "the question to git")
    case.fine(0, done=None)


@scenario("processes", seeds=4)
def hanging_git(case: Case) -> None:
    """git never answers."""
    _evidence_asks(case, "exec sleep 600")


@scenario("processes", seeds=4)
def hanging_child_of_git(case: Case) -> None:
    """Nor does what git started."""
    _evidence_asks(case, "sleep 600\nsleep 600")


@scenario("processes", seeds=4)
def torchrun(case: Case) -> None:
    """Two ranks under torchrun: the end and the code are theirs."""
    code = case.draw.choice([0, 3])
    train = case.train(30, exit=code)[1:]
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    case.start("--policy", "nano", job=[sys.executable, *run, *train])
    case.follow = list
    case.fine(1 if code else 0, done=None)


# ── signals ───────────────────────────────────────────────────────────────────────────────────────

WAITING = "time.sleep(0.05)\n" * 40
NAMES = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2")


def _drawn(case: Case) -> signal.Signals:
    return signal.Signals[f"SIG{case.draw.choice(NAMES)}"]


@scenario("signals")
def signal_kills(case: Case) -> None:
    """A signal to us is one to the job: without a handler it ends of it."""
    signum = _drawn(case)
    body = "signal.signal(2, signal.SIG_DFL)\nopen('up', 'w')\ntime.sleep(60)"
    watcher = case.start(job=case.plain(body))
    case.ready()
    time.sleep(case.draw.uniform(0, 1))
    watcher.send_signal(signum)
    case.fine(128 + signum, done=False)


@scenario("signals")
def signal_is_handled(case: Case) -> None:
    """The job's own handler decides what becomes of it."""
    signum, code = _drawn(case), case.draw.randrange(60)
    took = case.draw.uniform(0, 2)
    body = (
        "def end(*_):\n"
        f"    time.sleep({took}); open('done', 'a').write('x'); os._exit({code})\n"
        f"signal.signal({int(signum)}, end)\nopen('up', 'w')\ntime.sleep(60)"
    )
    watcher = case.start(job=case.plain(body))
    case.ready()
    watcher.send_signal(signum)
    case.fine(code)


@scenario("signals")
def signal_is_ignored(case: Case) -> None:
    """A job that ignores a signal runs to its end."""
    signum, code = _drawn(case), case.draw.randrange(60)
    body = f"signal.signal({int(signum)}, signal.SIG_IGN)\nopen('up', 'w')\n{WAITING}"
    watcher = case.start(job=case.plain(body, code))
    case.ready()
    for _ in range(case.draw.choice([1, 2])):
        watcher.send_signal(signum)
        time.sleep(0.1)
    case.fine(code)


@scenario("signals")
def storm(case: Case) -> None:
    """Hundreds of signals in a burst end nothing that they would not end without us."""
    body = (
        "for n in ('USR1', 'USR2', 'HUP', 'WINCH'):\n"
        "    signal.signal(getattr(signal, 'SIG' + n), lambda *_: None)\n"
        f"open('up', 'w')\n{WAITING}"
    )
    watcher = case.start(job=case.plain(body, 5))
    case.ready()
    for _ in range(case.draw.randrange(100, 500)):
        watcher.send_signal(
            signal.Signals[f"SIG{case.draw.choice(['USR1', 'USR2', 'HUP', 'WINCH'])}"]
        )
        time.sleep(case.draw.choice([0, 0, 0.001]))
    case.fine(5)


@scenario("signals")
def job_dies_of(case: Case) -> None:
    """What kills the job itself is its code: 128 + n."""
    signum = case.draw.choice(
        [
            signal.SIGKILL,
            signal.SIGSEGV,
            signal.SIGABRT,
            signal.SIGBUS,
            signal.SIGPIPE,
            signal.SIGXCPU,
            signal.SIGTERM,
        ]
    )
    body = f"signal.signal(13, signal.SIG_DFL)\ntime.sleep({case.draw.uniform(0, 1)})\n"
    case.start(job=case.plain(f"{body}os.kill(os.getpid(), {int(signum)})"))
    case.fine(128 + signum, done=False)


@scenario("signals", seeds=16)
def term_at_the_start(case: Case) -> None:
    """TERM while we start: the job was not started, or it got it; nothing is left."""
    watcher = case.start(job=case.plain("time.sleep(60)"))
    time.sleep(case.draw.uniform(0, 1.5))
    watcher.send_signal(signal.SIGTERM)
    case.ends((143, -signal.SIGTERM), done=False)
    case.clean()


@scenario("signals", seeds=16)
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


@scenario("signals")
def third_kills(case: Case) -> None:
    """Three times INT or TERM: all of the job is killed, whatever it ignores."""
    body = (
        "signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "open('up', 'w')\ntime.sleep(60)"
    )
    watcher = case.start(job=case.plain(body))
    case.ready()
    for _ in range(3):
        watcher.send_signal(case.draw.choice([signal.SIGTERM, signal.SIGINT]))
        time.sleep(case.draw.uniform(0.05, 0.3))
    case.fine(137, done=False)


@scenario("signals", seeds=6)
def watcher_is_killed(case: Case) -> None:
    """kill -9 of the supervisor harms nothing, and another one goes on."""
    code, steps = case.draw.randrange(1, 60), case.draw.randrange(150, 300)
    watcher = case.start("--policy", "nano", job=case.train(steps, sleep=0.02, exit=code))
    case.steps(case.draw.randrange(5, 60))
    watcher.kill()
    watcher.wait()
    time.sleep(case.draw.uniform(0, 2))
    case.watcher = case.popen([sys.executable, "-m", "supervise", "adopt", str(case.run)])
    case.unharmed(code)


@scenario("signals", seeds=6)
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


@scenario("the driver", seeds=0)
def always_fails(case: Case) -> None:
    """Shows what a failure looks like."""
    case.start(job=case.plain("", 7))
    case.fine(8)
