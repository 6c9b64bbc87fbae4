"""Whether the cause of a job's death is named, and where; writes `deaths.md`.

    python benchmarks/deaths.py [--only TEXT] [--keep FOLDER]

Each row is a job of `deaths_job.py` or `deaths_system.py` under `nano` with `job.on_crash`, one at
a time, with a webhook on this machine. What must be said of the cause, and what `on_crash` must
make of it, stands beside the job, and none of it is read from its output. Four places are read: the
first SEV0 or SEV1 on the console; the first in the webhook; in the evidence bundle the first of
`failures.json`, and `incident.json`. Each says all of the words, or the row is a no. `os._exit`
leaves nothing that `failures.json` could have. An end that was asked for is no incident: there is
no bundle of it. Of a secret nothing may be left in the messages and the run directory.

Exit code 1: a cause is not named, a class or a start is not the expected one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import deaths_job  # noqa: F401  enters its ways
import deaths_system  # noqa: F401
from deaths_way import AGAIN, ASKED, NOT, SECRET, TOKEN, UNSAVED, WAYS, Way

from supervise.store import read_audit

HERE = Path(__file__).resolve()
JOB = "deaths_job.py"
TABLE = HERE.with_name("deaths.md")
LIMIT_S, START_S = 180.0, 60.0
GROUPS = Path("/sys/fs/cgroup")
POLICY = """\
version: supervise/v1
policy: deaths
extends: nano
mode: enforce
job: {on_crash: restart, relaunch: {args: [--resume]}, checkpoints: {glob: ["ckpt*.pt"]}}
notify: {webhook: {url_env: HOOK}}
"""
FILES = ("failures.json", "incident.json")  # of the evidence bundle
PLACES = ("console", "webhook", *FILES)
BUNDLE = "{type}: {message} {file}:{line} {within} thread {thread} rank {rank} {title} {returncode}"
# The environment of the job, for its owner alone: a start after the death needs it.
NEEDED = "environ.json"
SHOWN = 140  # characters of a cause in the table


class Skip(Exception):  # noqa: N818
    """This machine does not permit the case; says why."""


@dataclass
class Found:
    """What was read of one death.

    Attributes:
        texts: by place; "" where nothing was said. words: title of the webhook's first.
        cls: of the failure that comes first. then: what was made of it. leaks: files with a secret.
    """

    texts: dict[str, str] = field(default_factory=dict)
    words: str = ""
    cls: str = ""
    then: str = ""
    leaks: list[str] = field(default_factory=list)

    def missing(self, place: str, way: Way) -> list[str]:
        """Return the expected words that a place lacks."""
        text = squeezed(self.texts.get(place, ""))
        return [word for word in way.says if squeezed(word) not in text]


# ── one job ───────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def receiver() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the address of a webhook, and what it has received, with `received`: seconds, Unix."""
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append({**body, "received": time.time()})
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def memory_group(most: int) -> Iterator[list[str]]:
    """Yield the beginning of a command that runs in a cgroup of `most` bytes; [] for 0."""
    if not most:
        yield []
        return
    for root, limit in ((GROUPS / "memory", "memory.limit_in_bytes"), (GROUPS, "memory.max")):
        group = root / f"supervise-deaths-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(most))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)]
        finally:
            wait_for(partial(empty, group / "cgroup.procs"), START_S)
            group.rmdir()
        return
    raise Skip("no cgroup with a limit of memory can be made here")


def empty(path: Path) -> bool:
    return not path.read_text()


@contextlib.contextmanager
def disk(where: Path, most: int) -> Iterator[None]:
    """Mount a file system of `most` bytes; nothing for 0."""
    if not most:
        yield
        return
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={most}", "tmpfs", str(where)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise Skip("mounting is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)  # noqa: S607


def command(name: str, way: Way) -> list[str]:
    """Return the command line of a job."""
    launcher = [sys.executable]
    if way.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(way.ranks)]
    return [*way.under, *launcher, JOB, name]


def die(name: str, way: Way, home: Path) -> Found:
    """Let one job die in `home`, and read what was said of it."""
    home.mkdir()
    (home / "policy.yaml").write_text(POLICY)
    for part in (JOB, "deaths_system.py", "deaths_way.py"):
        shutil.copy(HERE.with_name(part), home)
    inherited = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
    words = ["--policy", "policy.yaml", "--run-dir", "run", "--", *command(name, way)]
    with (
        receiver() as (url, received),
        memory_group(way.memory) as before,
        disk(home / "disk", way.disk),
        (home / "out.txt").open("w") as out,
        (home / "err.txt").open("w") as err,
    ):
        env = {**inherited, "HOOK": url, "API_TOKEN": SECRET, "OMP_NUM_THREADS": "1"}
        supervise = subprocess.Popen(
            [*before, sys.executable, "-m", "supervise", *words],
            cwd=home,
            env=env,
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
        )
        try:
            if way.sent:
                wait_for((home / "up").exists, START_S)
                time.sleep(0.2)
                os.kill(int((home / "up").read_text()), way.sent)
            supervise.wait(LIMIT_S)
        finally:
            if supervise.poll() is None:
                supervise.send_signal(signal.SIGTERM)
                supervise.wait(START_S)
    (home / "webhook.json").write_text(json.dumps(received, indent=1))
    return read(home, received, supervise.returncode)


def wait_for(check: Any, within_s: float) -> None:
    until = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < until, "it did not come about in time"
        time.sleep(0.05)


# ── what was said ─────────────────────────────────────────────────────────────────────────────────


def read(home: Path, received: list[dict[str, Any]], code: int) -> Found:
    """Read the four places, the class of the failure, and what was made of it."""
    found, run = Found(), home / "run"
    console = (home / "err.txt").read_text(errors="replace")
    lines = [line for line in console.splitlines() if line.startswith("supervise: ")]
    found.texts["console"] = first_message(lines)
    grave = [body["data"] for body in received if body["data"]["severity"] in ("SEV0", "SEV1")]
    if grave:
        found.texts["webhook"] = " ".join(map(str, leaves(grave[0])))
        found.words = grave[0]["title"].replace(f"{sys.prefix}/", "")
    for path in sorted(run.glob("incidents/*/snapshot-*/failures.json")):
        failures = json.loads(path.read_text())
        found.texts["failures.json"] = BUNDLE.format(**failures[0])
        found.cls = failures[0]["cls"]
    for path in sorted(run.glob("incidents/*/snapshot-*/incident.json")):
        found.texts["incident.json"] = " ".join(map(str, leaves(json.loads(path.read_text()))))
    records = list(read_audit(run / "audit.log"))
    ended = [r["data"]["details"] for r in records if r["data"].get("what") == "failure"]
    if ended and "failures.json" not in found.texts:
        found.cls = ended[0]["cls"]
    again = [r for r in records if r["data"].get("what") == "launched"]
    incident = any(r["kind"] == "incident" for r in records)
    if again:
        found.then = AGAIN if code == 0 else f"started again, then code {code}"
    elif not incident:
        found.then = ASKED
    else:
        text = " ".join(r["reason"] for r in records)
        found.then = UNSAVED if "no good checkpoint" in text else NOT
    found.leaks = [
        str(path.relative_to(home))
        for path in (*run.rglob("*"), home / "webhook.json")
        if path.is_file()
        and path.name != NEEDED
        and any(word.encode() in path.read_bytes() for word in (SECRET, TOKEN))
    ]
    found.leaks += ["console"] if any(w in line for w in (SECRET, TOKEN) for line in lines) else []
    return found


def first_message(lines: list[str]) -> str:
    """Return the first SEV0 or SEV1 with its lines."""
    held: list[str] = []
    for line in lines:
        text = line.removeprefix("supervise: ")
        if re.match(r"SEV[01] ", text) and not held:
            held = [text]
        elif held and text.startswith("  "):
            held.append(text)
        elif held:
            break
    return "\n".join(held)


def leaves(value: Any) -> Iterator[Any]:
    """Yield all texts and numbers of a JSON value."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    elif value is not None:
        yield value


def squeezed(text: str) -> str:
    """Return a text without its spaces, for lines may be folded."""
    return "".join(text.split())


# ── the table ─────────────────────────────────────────────────────────────────────────────────────


def row(way: Way, found: Found) -> tuple[str, bool]:
    """Return a line of the table, and whether all is as expected."""
    good, cells = True, []
    for place in PLACES:
        lacks = found.missing(place, way)
        if (place in FILES and way.then == ASKED) or (place == "failures.json" and way.silent):
            cells.append("–")
            continue
        good &= not lacks
        cells.append("yes" if not lacks else f"**no**: {', '.join(lacks)}")
    cls = found.cls or "–"
    if found.cls != way.cls:
        good, cls = False, f"**{cls}**, not {way.cls or 'none'}"
    then = found.then
    if then != way.then:
        good, then = False, f"**{then}**, not {way.then}"
    words = found.words if len(found.words) <= SHOWN else f"{found.words[:SHOWN]}…"
    if found.leaks:
        good, words = False, f"**secret in {', '.join(found.leaks)}**"
    words = re.sub(r"\s+", " ", re.sub(r"^inc-1: ", "", words)).replace("|", "\\|")
    return f"| {way.does} | {' | '.join(cells)} | {cls} | {then} | {words} |", good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows with this text")
    parser.add_argument("--keep", type=Path, help="folder for what the jobs write")
    asked = parser.parse_args()
    home = asked.keep or Path(tempfile.mkdtemp(prefix="supervise-deaths-"))
    home.mkdir(exist_ok=True)
    rows, good = [], 0
    for name, way in WAYS.items():
        if asked.only not in f"{name} {way.does}":
            continue
        try:
            line, fine = row(way, die(name, way, home / name))
        except Skip as skip:
            line, fine = f"| {way.does} | skipped: {skip} | | | | | | |", True
        good += fine
        rows.append(line)
        print(line, flush=True)
    text = "\n".join(
        [
            "# Jobs that die\n",
            "Written by `python benchmarks/deaths.py`, whose docstring says what counts.",
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}.\n",
            f"| the job dies of | {' | '.join(PLACES)} | class | `on_crash` | title |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            f"\n{good} of {len(rows)} are as expected.",
        ]
    )
    if not asked.only:
        TABLE.write_text(text + "\n", encoding="utf-8")
    if asked.keep is None:
        shutil.rmtree(home, ignore_errors=True)
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
