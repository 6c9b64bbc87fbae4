"""A supervisor reduced to its job package: start a command, pass signals on, exit as it did.

Run as `python wrapper.py COMMAND...`. Prints `pid <n>` on stderr once the job runs, and in the end
how long it was stopped together with the job, if it was.
"""

import os
import sys
import time

import supervise.job.process_tree  # noqa: F401 - here: a handler would find a later import half done
from supervise.errors import LaunchError
from supervise.job.process import Process, exit_code
from supervise.job.signals import Forwarder
from supervise.job.terminal import Terminal


def main() -> int:
    forwarder = Forwarder()
    forwarder.install()
    try:
        process = Process.start(sys.argv[1:], os.environ, terminal=Terminal.find())
    except LaunchError as error:
        print(f"{error} | {error.hint}", file=sys.stderr)
        return error.exit_code
    forwarder.attach(process)
    print(f"pid {process.pid}", file=sys.stderr, flush=True)
    while process.poll() is None:
        time.sleep(0.005)
    if process.interrupted:
        print("interrupted at the terminal", file=sys.stderr)
    if process.suspended_ns:
        print(f"suspended for {process.suspended_ns} ns", file=sys.stderr)
    return exit_code(process.returncode)


sys.exit(main())
