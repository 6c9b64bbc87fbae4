"""A server over runs with the names, incidents and files that its page has to show."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

import supervise.web
from supervise.web import Page, Settings
from tests.support import recorded_run
from tests.support.waiting import wait_until

SPIKE = (*[2.0] * 40, 8.0, 7.0, *[2.0] * 60)


STATIC = Path(supervise.web.__file__).parent / "static"


EVIL = "<script>alert(1)</script>\u202e\"'"


EVIL_NAMES = ("train_loss_raw", "grad_global_norm", EVIL)


class Served:
    """A server over a directory of runs, as the command starts it."""

    def __init__(self, directory, *options):
        command = [sys.executable, "-m", "supervise", "web", directory, *options]
        homes = {"XDG_STATE_HOME": "state", "XDG_CACHE_HOME": "cache"}
        own = {name: str(directory.parent / folder) for name, folder in homes.items()}
        environ = {**os.environ, **own}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
        self.lines = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        wait_until(lambda: any("ssh -L" in line for line in self.lines), "the address")

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)

    def found(self, pattern):
        """The first group of a pattern in what was printed so far."""
        match = re.search(pattern, "".join(self.lines))
        return match and match[1]

    def close(self):
        self.process.terminate()
        self.reader.join(30)
        self.process.stderr.close()
        assert self.process.wait(30) == 0, "".join(self.lines)


def record(directory, name, *losses, **options):
    """Record a run with these losses below a directory with a policy."""
    frames = recorded_run.make_frames(0, *losses)
    policy = directory / "small.yaml"
    return recorded_run.record_run(directory / "runs" / name, frames, policy=policy, **options)


OURS = {"X-Supervise": "1", "Content-Type": "application/json"}


def page_of(home):
    """Return a page over the runs of a directory, in this process."""
    return Page(Settings(directory=home / "runs", cache=home / "cache"))


@asynccontextmanager
async def reading(page):
    """Yield a client of a page in this process."""
    transport = httpx.ASGITransport(app=page.application, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield http


def refuse(thread):
    raise RuntimeError("can't start new thread")


def copied_log(directory, home):
    """Copy the run with an incident; return the path of its log, and its records."""
    log = shutil.copytree(directory / "runs" / "spike", home / "runs" / "spike") / "audit.log"
    return log, [json.loads(line[65:]) for line in log.read_bytes().splitlines()]


def write_log(log, records):
    texts = [json.dumps(record, separators=(",", ":")) for record in records]
    log.write_text("".join(f"{'0' * 64} {text}\n" for text in texts))


def decoded(raw):
    """The curves as the browser reads them: header, and of each stretch x and values by metric."""
    (size,) = struct.unpack_from("<I", raw)
    assert (4 + size) % 8 == 0
    header, at, stretches = json.loads(raw[4 : 4 + size]), 4 + size, []
    for stretch in header["stretches"]:
        n = stretch["n"]
        x = [struct.unpack_from(f"<{n}d", raw, at + 8 * n * plane) for plane in range(4)]
        at += 32 * n
        values = {}
        for metric in header["metrics"]:
            values[metric] = [struct.unpack_from(f"<{n}f", raw, at + 4 * n * p) for p in range(4)]
            at += 16 * n
        stretches.append((x, values))
    assert at == len(raw)
    return header, stretches


def curves_of(client, run, **query):
    path = f"/api/run/{run}/series"
    return wait_until(lambda: (a := client.get(path, params=query)).status_code == 200 and a)
