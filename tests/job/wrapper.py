"""A supervisor reduced to its job package: start a command, pass signals on, exit as it did.

Run as `python wrapper.py COMMAND...`. Prints `pid <n>` on stderr once the job runs, and in the end
how long it was stopped together with the job, if it was. With KEEP=FILE in the environment the
job's output is kept there.
"""

import os
import sys
import time
from pathlib import Path

from supervise.errors import LaunchError
from supervise.runtime import JobOutput, Process, SignalForwarder, Terminal, exit_code


def main() -> int:
    forwarder = SignalForwarder()
    forwarder.install()
    output = JobOutput(Path(os.environ["KEEP"])) if "KEEP" in os.environ else None
    if output is not None:
        output.start()
    outputs = {} if output is None else output.outputs
    try:
        terminal = Terminal.find()
        process = Process.start(sys.argv[1:], os.environ, terminal=terminal, outputs=outputs)
    except LaunchError as error:
        print(f"{error} | {error.hint}", file=sys.stderr)
        return error.exit_code
    forwarder.attach(process)
    print(f"pid {process.pid}", file=sys.stderr, flush=True)
    while process.poll() is None:
        time.sleep(0.005)
    if output is not None:
        output.close()
    if process.interrupted:
        print("interrupted at the terminal", file=sys.stderr)
    if process.suspended_ns:
        print(f"suspended for {process.suspended_ns} ns", file=sys.stderr)
    return exit_code(process.returncode)


sys.exit(main())
