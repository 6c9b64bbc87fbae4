"""Standard streams, limits, and what a job hooks into Python by itself."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from world import Case, Skip, limit, scenario

Popen = Callable[..., Any]


def alike(
    case: Case,
    job: list[str],
    run: Callable[[Popen], Any],
    *words: str,
    replay: Sequence[int] = (0,),
) -> None:
    """Insist that the job comes to the same under us, when `run` starts it the same way."""
    before = run(lambda **options: case.popen(job, **options))
    before.wait(60)
    done = case.text("done")
    code = case.forget(before)
    run(lambda **options: case.start(*words, job=job, **options))
    case.fine(code, bool(done), replay)


def quiet(case: Case) -> list[str]:
    return case.draw.choice([[], ["-q"]])


# ── stdio ─────────────────────────────────────────────────────────────────────────────────────────


@scenario("stdio", seeds=12)
def closed_descriptors(case: Case) -> None:
    """Any of the three is closed."""
    closed = case.draw.choice([(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
    job = case.plain("time.sleep(0.3)", case.draw.randrange(60))

    def before() -> None:
        for fd in closed:
            os.close(fd)

    alike(case, job, lambda popen: popen(preexec_fn=before), *quiet(case))


@scenario("stdio", seeds=12)
def full_pipe(case: Case) -> None:
    """A full pipe that nobody reads stops neither us nor a job that writes nothing to it."""
    names = case.draw.choice([["stderr"], ["stdout", "stderr"]])
    room, reader_pipes = case.draw.choice([0, 0, 100]), []
    job = case.plain("time.sleep(1)", case.draw.randrange(60))
    if case.draw.random() < 0.3:
        job = case.train(100, sleep=0.01)

    def run(popen: Popen) -> Any:
        reader, writer = os.pipe()
        reader_pipes.append(reader)
        os.set_blocking(writer, False)
        size = fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
        os.write(writer, b"x" * (size - room))
        os.set_blocking(writer, True)
        started = popen(**dict.fromkeys(names, writer))
        os.close(writer)
        return started

    try:
        alike(case, job, run, *quiet(case))
    finally:
        for reader in reader_pipes:
            os.close(reader)


# ── limits ────────────────────────────────────────────────────────────────────────────────────────


def _start_limited(popen: Popen, **limits: int) -> Any:
    return popen(preexec_fn=limit(**limits))


def _limited(case: Case, job: list[str], *words: str, **limits: int) -> None:
    alike(case, job, partial(_start_limited, **limits), *words)


@scenario("limits", seeds=12)
def few_files(case: Case) -> None:
    """RLIMIT_NOFILE: with very few the journal may end early, and replay says so."""
    job = case.plain("time.sleep(1.2)", case.draw.randrange(60))
    words, most = quiet(case), case.draw.choice([16, 20, 24, 32, 48, 64, 256])
    run = partial(_start_limited, nofile=most)
    alike(case, job, run, *words, replay=(0, 2) if most < 32 else (0,))


@scenario("limits")
def small_files(case: Case) -> None:
    """RLIMIT_FSIZE: the records cannot grow beyond it."""
    size = case.draw.choice([0, 1000, 4096, 10_000, 40_000, 1 << 20])
    job = case.plain("time.sleep(1.2)" if size else "os.unlink('pid'); time.sleep(1)", 7)
    before = ["prlimit", f"--fsize={size}:unlimited"]
    case.start(job=["sh", "-c", 'ulimit -f unlimited 2>/dev/null; "$0" "$@"', *job], before=before)
    case.follow = list
    case.ends(7 if size >= 1 << 20 else (7, 64, 73, 74), done=None)  # a policy is 100 kB
    case.clean()


def _kind(case: Case) -> list[str]:
    """A job that waits, computes, or trains."""
    code = case.draw.randrange(60)
    if case.draw.random() < 0.3:
        return case.train(80, sleep=0.005, exit=code)
    return case.plain(case.draw.choice(["time.sleep(1.2)", "sum(range(10**7))"]), code)


@scenario("limits")
def odd_limits(case: Case) -> None:
    """A small stack, no locked memory, no core, little CPU time for the job."""
    limits = {"stack": 512 << 10, "memlock": 0, "core": 0, "cpu": 30, "sigpending": 4}
    limits |= {"nice": 0, "msgqueue": 0}
    name = case.draw.choice(list(limits))
    _limited(case, _kind(case), *quiet(case), **{name: limits[name]})


@scenario("limits")
def little_memory(case: Case) -> None:
    """RLIMIT_AS: where it leaves no room to watch, that is said, and the job is as without us."""
    code, size = case.draw.randrange(60), case.draw.choice([400, 600, 1000, 2000])
    job = case.plain("time.sleep(1.2)", code)
    if size < 512:
        _start_limited(partial(case.start, job=job), **{"as": size << 20})
        case.ends(code)
        assert "address space" in case.text("stderr"), case.said()
    else:
        _limited(case, job, **{"as": size << 20})


@scenario("limits", seeds=20)
def few_processes(case: Case) -> None:
    """RLIMIT_NPROC: "can't start new thread" ends neither the job nor the watching.

    Below five there is no place for the job beside our own threads: 126, and it is not started.
    """
    if os.getuid() or not shutil.which("setpriv"):
        raise Skip("needs root and setpriv, to become a user of few processes")
    user, most = 54_000 + os.getpid() % 5000, max(5, case.draw.randrange(3, 14))
    for path in (case.home, case.shm, case.home / "tmp"):
        os.chown(path, user, user)
    trains = most > 4 and case.draw.random() < 0.4
    job = case.train(150, sleep=0.02) if trains else case.plain("time.sleep(2)", 5)
    case.env["HOME"] = str(case.home)
    reads = "-all,+dac_override,+dac_read_search"  # Python and torch may lie where only root looks
    become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    become += [f"--inh-caps={reads}", f"--ambient-caps={reads}", f"--bounding-set={reads}"]
    case.start(*quiet(case), job=job, before=[*become, "prlimit", f"--nproc={most}"])
    case.ends(0 if trains else 5, done=not trains)
    case.clean()
    case.readable(replay=(0, 2))
    if trains:
        assert case.state().get("step") == 149, f"watched to step {case.state().get('step')}"


# ── hooks ─────────────────────────────────────────────────────────────────────────────────────────

HOOKS = {
    "handler_of_chld": "signal.signal(17, lambda *_: None)\nsubprocess.run(['true'])",
    "ignored_chld": "signal.signal(17, signal.SIG_IGN)\nsubprocess.run(['true'])",
    "alarms": "n = [0]\nsignal.signal(14, lambda *_: n.append(0))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)\n"
    "end = time.time() + 1\nwhile time.time() < end: pass\nassert len(n) > 50\n"
    "signal.setitimer(signal.ITIMER_REAL, 0)",  # else it may end Python's end
    "profiling_timer": "signal.signal(27, lambda *_: None)\n"
    "signal.setitimer(signal.ITIMER_PROF, 0.005, 0.005)\nsum(range(10**7))\n"
    "signal.setitimer(signal.ITIMER_PROF, 0)",
    "wakeup_fd": "r, w = os.pipe(); os.set_blocking(w, False); signal.set_wakeup_fd(w)\n"
    "signal.signal(10, lambda *_: None); os.kill(os.getpid(), 10); os.read(r, 1)",
    "excepthook": "sys.excepthook = lambda *e: print('hooked', e[0].__name__)\n1 / 0",
    "thread_excepthook": "threading.excepthook = lambda a: print('hooked', a.exc_type)\n"
    "t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()",
    "atexit_order": "import atexit\n[atexit.register(print, n, flush=True) for n in range(5)]",
    "atexit_ends_it": "import atexit\natexit.register(os._exit, 9)",
    "atexit_raises": "import atexit\natexit.register(lambda: 1 / 0)",
    "faulthandler_on": "import faulthandler\nfaulthandler.enable()\n"
    "faulthandler.dump_traceback_later(60)\nfaulthandler.register(10)\n"
    "os.kill(os.getpid(), 10); faulthandler.cancel_dump_traceback_later()",
    "faulthandler_at_a_crash": "import faulthandler\nfaulthandler.enable()\n"
    "os.kill(os.getpid(), 11)",
    "tracing": "sys.settrace(lambda *a: None)\nimport json; json.loads('[1]')\nsys.settrace(None)",
    "profiler": "sys.setprofile(lambda *a: None)\nimport json; json.loads('[1]')",
    "audit_hook": "sys.addaudithook(lambda e, a: None)\nopen(os.devnull).close()",
    "no_gc": "import gc\ngc.disable(); assert not gc.isenabled(); gc.set_debug(0)",
    "own_stdout": "import io\nsys.stdout = io.StringIO(); print(1); sys.stdout = sys.__stdout__",
    "exit_with_text": "sys.exit('a reason')",
    "exit_with_nothing": "sys.exit()",
    "hard_exit": "os._exit(11)",
    "uncaught": "raise RuntimeError('mine')",
    "keyboard_interrupt": "raise KeyboardInterrupt",
    "recursion": "def f(): f()\nf()",
    "late_thread": "threading.Thread(target=lambda: (time.sleep(0.7), print('late'))).start()",
    "daemon_thread": "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
    "fork_and_exit": "if os.fork() == 0: sys.exit(3)\nprint(os.wait()[1])",
    "import_hook": "class F:\n    def find_spec(self, *a): return None\n"
    "sys.meta_path.insert(0, F())\nimport json, csv",
    "closes_all_files": "os.closerange(3, 256)\nprint('still here')",
    "changes_directory": "os.chdir('/')\ntime.sleep(1.2)",
    "clears_environment": "os.environ.clear()\nsubprocess.run([sys.executable, '-c', 'print(1)'])",
    "own_sleep": "time.sleep = lambda s: None\ntime.time = lambda: 0\ntime.monotonic = lambda: 0",
}
NOISE = re.compile(r"0x[0-9a-f]+|^supervise: .*\n", re.M)  # addresses, and our own lines
FLAGS = ("-O", "-B", "-Werror", "-Xdev", "-I", "-S", "-E", "-u", "-v", "-bb", "-Ximporttime")


def _same_output(case: Case, job: list[str]) -> None:
    alike(case, job, lambda popen: popen(), "-q")
    if "-v" not in job and "-Ximporttime" not in job:
        for name in ("stdout", "stderr"):
            ours, bare = (NOISE.sub("", case.text(each)) for each in (name, f"bare.{name}"))
            assert ours == bare, f"{name} differs: {ours[-300:]!r}"


def _enter_hook(name: str, body: str) -> None:
    def run(case: Case) -> None:
        _same_output(case, case.plain(body, case.draw.randrange(60)))

    run.__name__ = f"hook_{name}"
    scenario("hooks", seeds=3)(run)


for _name, _body in HOOKS.items():
    _enter_hook(_name, _body)


@scenario("hooks", seeds=len(FLAGS))
def interpreter_flags(case: Case) -> None:
    """Python's own options."""
    flag = FLAGS[case.seed % len(FLAGS)]
    python, *rest = case.plain("print('on')", 6)
    _same_output(case, [python, flag, *rest])


HOOKS_OF_TRAINING = (
    "import signal; signal.signal(17, signal.SIG_IGN)",
    "import signal; signal.signal(14, lambda *_: None);"
    " signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003); import atexit;"
    " atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)",  # else it ends the exit
    "import sys; sys.settrace(lambda *a: None)",
    "import sys; sys.setprofile(lambda *a: None)",
    "import faulthandler; faulthandler.enable(); faulthandler.dump_traceback_later(500)",
    "import gc; gc.disable()",
    "import sys; sys.setrecursionlimit(250)",
    "import os; os.environ.clear()",
    "import warnings; warnings.simplefilter('error')",
    "import threading; threading.stack_size(1 << 18)",
)


@scenario("hooks", seeds=10)
def hooked_training(case: Case) -> None:
    """Handlers, hooks and timers in a real training; its weights are those without us."""
    before, code = case.draw.choice(HOOKS_OF_TRAINING), case.draw.randrange(60)
    case.start("--policy", "nano", job=case.train(60, sleep=0.01, exit=code, before=before))
    case.unharmed(code)
