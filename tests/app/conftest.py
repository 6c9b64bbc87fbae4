"""Processes that stand for a job, ended with the test, and a main loop on a thread of its own."""

import os
import subprocess

import pytest

from ..job.conftest import control_of, controlled, looping, start

__all__ = ["control_of", "controlled", "looping", "start"]  # the fixtures


@pytest.fixture
def sleeper():
    """A function that starts a process with these variables; returns its pid."""
    started = []

    def start(environ):
        pipe, environ = subprocess.PIPE, {**os.environ, **environ}
        popen = subprocess.Popen(
            ["sh", "-c", "echo; read -r _"], env=environ, stdin=pipe, stdout=pipe
        )
        started.append(popen)
        popen.stdout.readline()  # a process that is being started has no environment yet
        return popen.pid

    yield start
    for popen in started:
        popen.kill()
        popen.communicate()
