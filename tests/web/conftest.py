"""Three runs, the server over them, and its reader."""

import json

import httpx
import pytest

from supervise.checkpoints import Register
from supervise.core.model import Announced, Frame, Launched
from tests.support import recorded_run
from tests.support.web_page import EVIL_NAMES, OURS, SPIKE, Served, record


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Three runs: with an incident, with hostile names, and one that cannot be read."""
    home = tmp_path_factory.mktemp("page")
    runs, policy = home / "runs", home / "small.yaml"
    policy.write_text(recorded_run.SMALL)
    run = record(home, "spike", *SPIKE)
    register = Register(run.path)
    register.add("/c/last.pt", step=49)
    register.write()
    bundle = run.incidents_path / "inc-1" / "snapshot-1"
    bundle.mkdir(parents=True)
    listed = [{"name": n, "bytes": 2, "sha256": "0"} for n in ("host.json", "environment.json")]
    (bundle / "manifest.json").write_text(json.dumps({"version": 1, "files": listed}))
    for name in ("host.json", "environment.json", "unlisted.json"):
        (bundle / name).write_text("{}")
    begin = (Launched(1, 2**22 + 7, 0), Announced(2, 0, 1, 7, EVIL_NAMES))
    frames = [
        Frame((10 + step) * 10**9, 0, 0, step, (8.0 if step == 40 else 2.0, 1.0, float(step)))
        for step in range(60)
    ]
    recorded_run.record_run(runs / "evil", frames, policy=policy, begin=begin)
    (runs / "broken").mkdir()
    (runs / "broken" / "run.json").write_text("{")
    (runs / "secret.txt").write_text("not to be read")
    return home


@pytest.fixture(scope="module")
def served(directory):
    """The server, with commands allowed."""
    server = Served(directory / "runs", "--write", "--by", "anna")
    yield server
    server.close()


@pytest.fixture(scope="module")
def address(served):
    return served.found(r"(http://127.0.0.1:\d+)/")


@pytest.fixture(scope="module")
def client(served, address):
    """A reader with the token."""
    token = served.found(r"token=([\w-]+)")
    headers = {"Authorization": f"Bearer {token}"}
    limits = httpx.Limits(keepalive_expiry=1)  # before the server closes an idle connection
    with httpx.Client(base_url=address, headers=headers, timeout=60, limits=limits) as http:
        yield http


@pytest.fixture(scope="module")
def headers(served, address):
    """Those of a command."""
    secret = served.found(r"commands: ([\w-]+)")
    return {**OURS, "Origin": address, "X-Supervise-Write": secret}
