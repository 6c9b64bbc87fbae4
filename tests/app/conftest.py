"""Processes that stand for a job, ended with the test, and a main loop on a thread of its own."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from supervise.runtime import Control, Process

from ..job.conftest import start

__all__ = ["start"]  # the fixture


@pytest.fixture
def sleeper() -> Iterator[Callable[[Mapping[str, str]], int]]:
    """Start a process with these variables in its environment; return its pid."""
    started: list[subprocess.Popen[bytes]] = []

    def start(environ: Mapping[str, str]) -> int:
        """It speaks once it runs: a process that is being started has no environment yet."""
        popen = subprocess.Popen(
            ["sh", "-c", "echo; read -r _"],
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(popen)
        assert popen.stdout is not None and popen.stdout.readline()
        return popen.pid

    yield start
    for popen in started:
        popen.kill()
        popen.communicate()


@pytest.fixture
def looping() -> Iterator[Callable[[Process, Any], Control]]:
    """A control without ranks, pumped every 2 ms; `relaunch` is what it relaunches with."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def loop(control: Control) -> None:
        while not over.is_set():
            control.process.poll()
            control.pump(time.monotonic_ns())
            time.sleep(0.002)

    def begin(process: Process, relaunch: Any) -> Control:
        segments = SimpleNamespace(ranks={}, keep_signals=lambda until_ns: None)
        control = Control(process, segments, lambda *_: {}, relaunch)
        threads.append(threading.Thread(target=loop, args=(control,)))
        threads[-1].start()
        return control

    yield begin
    over.set()
    for thread in threads:
        thread.join()
