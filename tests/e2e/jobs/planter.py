"""Puts FIFOs in the place of files of its run, then becomes the job that was named behind it."""

import os
import sys
from pathlib import Path

names, job = sys.argv[1].split(","), sys.argv[2:]
config = Path(os.environ["SUPERVISE_PROBE"])
for name in names:
    path = config.parent / name.replace("PID", str(os.getpid()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
os.execv(job[0], job)
