"""Tables as files of every format that the readers know, made by the packages that write them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

OFFLINE = """
import json, sys
import wandb
folder, rows = json.load(sys.stdin)
settings = wandb.Settings(
    mode="offline", silent=True, console="off", disable_git=True, disable_code=True,
    x_disable_stats=True, x_disable_meta=True, root_dir=folder,
)
run = wandb.init(project="tests", settings=settings)
for row in rows:
    run.log({name: float(value) for name, value in row.items()})
run.finish()
"""


@pytest.fixture(scope="session")
def offline_run(tmp_path_factory):
    """A function that logs rows with the real package, offline, and returns its folder."""

    def make(rows):
        folder = tmp_path_factory.mktemp("offline")
        kept = ("PATH", "LANG", "VIRTUAL_ENV")
        environ = {name: os.environ[name] for name in kept if name in os.environ}
        subprocess.run(
            [sys.executable, "-c", OFFLINE],
            input=json.dumps([str(folder), rows]),
            text=True,
            env={**environ, "HOME": str(folder), "WANDB_ERROR_REPORTING": "false"},
            check=True,
            timeout=100,
            capture_output=True,
        )
        return folder

    return make


@pytest.fixture
def event_file(tmp_path):
    """A function that writes scalars, `(tag, step, value)`, as TensorBoard does."""

    def write(scalars, folder=tmp_path / "events"):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = EventFileWriter(str(folder))
        for tag, step, value in scalars:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(wall_time=1.0, step=step, summary=summary))
        writer.close()
        return folder

    return write
