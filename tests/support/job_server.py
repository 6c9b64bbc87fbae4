"""Runs training scripts under the real probe, in forks of one process that has torch loaded.

Started like any job: with or without the probe's directory on PYTHONPATH. A script then costs a
tenth of a second and not an import of torch. The arguments are modules to import next to torch.
Reads one JSON object per line, {"script", "folder", "config", "environ"}; answers with the child's
pid, and after the next line with its exit code.

The child runs its exit hooks and is gone, without the second that taking torch apart would take;
how Python itself ends is tested by scripts that are launched for real.
"""

import atexit
import contextlib
import importlib
import json
import os
import runpy
import sys
import traceback
import warnings

with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what libraries warn about each other while imported
    for name in sys.argv[1:]:
        importlib.import_module(name)

import torch


def become(job):
    """In the child: restart the probe with this job's own probe.json."""
    os.chdir(job["folder"])
    for name, target in (("out", 1), ("err", 2)):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), target)
    os.environ.update(job["environ"])
    package = sys.modules.get("_supervise_probe")
    if package is not None:
        package._probe.start_process(package.context.read_config(job["config"]))
    sys.argv = [job["script"]]
    sys.path.insert(0, job["folder"])


def run(job):
    """In the child: the script to its end, as Python would end it."""
    code = 1
    try:
        become(job)
        runpy.run_path(job["script"], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)


def serve():
    """In the parent: one forked child at a time."""
    torch.set_num_threads(1)
    torch.optim.Rprop([torch.zeros(1, requires_grad=True)])  # imports what every job needs
    while line := sys.stdin.readline():  # a `for` would drive the steps of every job
        child = os.fork()
        if child == 0:
            run(json.loads(line))
        print(child, flush=True)
        sys.stdin.readline()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)


serve()
