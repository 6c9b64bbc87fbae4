"""The page over HTTP: who may ask, what is answered, and what a hostile name becomes."""

import asyncio
import html
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

import supervise.web
from supervise.catalog import BUILD, all_metrics
from supervise.checkpoints import Register
from supervise.cli import invoke as run_cli
from supervise.core.model import Announced, Exited, Frame, Launched
from supervise.runtime import ControlInbox
from supervise.store import Audit
from supervise.web import BOARDS, BuildingError, Gate, Page, Query, RunCurves, Settings
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


OURS = {"X-Supervise": "1", "Content-Type": "application/json"}
REFUSED = [
    ("GET", "/api/runs", {"Authorization": ""}, 401),
    ("GET", "/api/runs", {"Authorization": "Bearer wrong"}, 401),
    ("GET", "/run/spike/?token=wrong", {"Authorization": ""}, 401),
    ("GET", "/api/runs", {"Host": "evil.example"}, 421),
    ("GET", "/api/runs", {"Host": "127.0.0.1.evil.example"}, 421),
    ("POST", "/api/run/spike/command", OURS, 403),  # without an Origin
    ("POST", "/api/run/spike/command", OURS | {"Origin": "http://evil.example"}, 403),
    ("POST", "/api/run/spike/command", {"Origin": "OWN", "Content-Type": "application/json"}, 403),
    ("POST", "/api/run/spike/command", OURS | {"Origin": "OWN", "Content-Type": "text/plain"}, 403),
    ("POST", "/api/run/spike/command", OURS | {"Origin": "OWN"}, 403),  # without the second token
    ("POST", "/api/run/spike/command", OURS | {"Origin": "OWN", "X-Supervise-Write": "no"}, 403),
    ("PUT", "/api/run/spike/note", OURS | {"Origin": "OWN"}, 403),
    ("DELETE", "/api/run/spike", OURS | {"Origin": "OWN"}, 405),
    ("GET", "/api/run/spike/command", {}, 405),
    ("GET", "/run/../secret.txt", {}, 404),
    ("GET", "/run/..%2fsecret.txt/", {}, 404),
    ("GET", "/api/run/%2e%2e", {}, 404),
    ("GET", "/api/run/secret.txt", {}, 404),
    ("GET", "/api/run/spike/incident/inc-9", {}, 404),
    ("GET", "/api/run/spike/incident/..%2finc-1", {}, 404),
    ("GET", "/static/..%2fserver.py", {}, 404),
    ("GET", "/run/spike/incident/inc-1/evidence/snapshot-1/environment.json", {}, 404),
    ("GET", "/run/spike/incident/inc-1/evidence/snapshot-1/unlisted.json", {}, 404),
    ("GET", "/run/spike/incident/inc-1/evidence/..%2finc-1/incident.json", {}, 404),
    ("GET", "/api/run/spike/series", {}, 400),
    ("GET", "/api/run/spike/series?m=a&px=4001", {}, 400),
    ("GET", "/api/run/spike/series?m=a&lo=nan", {}, 400),
    ("GET", "/api/run/spike/series?m=a&x=wall", {}, 400),
    ("GET", "/api/run/spike/series?m=a&rank=7", {}, 400),
    ("GET", "/api/run/spike/series?" + "&".join(f"m={n}" for n in range(65)), {}, 400),
    ("GET", "/api/compare", {}, 400),
    ("GET", "/api/run/broken", {}, 503),
]


@pytest.mark.parametrize(("method", "path", "headers", "status"), REFUSED)
def test_what_is_not_allowed_is_refused(client, address, method, path, headers, status):
    given = {name: address if value == "OWN" else value for name, value in headers.items()}
    content = b"{}" if method in ("POST", "PUT", "DELETE") else None
    ask = partial(client.request, method, path, headers=given, content=content)
    answer = wait_until(lambda: (a := ask()).status_code != 202 and a, "the curves")
    assert answer.status_code == status, answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    if answer.headers["content-type"] == "application/json":
        assert answer.json()["error"] and "Traceback" not in answer.text


@pytest.mark.parametrize("content", [b"x" * 20_000, iter([b"{}"])], ids=["large", "of no length"])
def test_a_body_that_is_too_large_is_not_read(client, address, content):
    headers = {**client.headers, **OURS, "Origin": address}
    answer = httpx.post(f"{address}/api/run/spike/command", headers=headers, content=content)
    assert answer.status_code == 413


def test_the_token_leaves_the_address_and_stays_in_a_cookie(served, address):
    token = served.found(r"token=([\w-]+)")
    with httpx.Client(base_url=address, follow_redirects=True, timeout=60) as browser:
        answer = browser.get(f"/run/spike/?board=icu&token={token}&x=time")
        assert str(answer.url) == f"{address}/run/spike/?board=icu&x=time"
        cookie = answer.history[-1].headers["set-cookie"]
        assert cookie.startswith(f"supervise_{address.rpartition(':')[2]}={token};")
        assert "HttpOnly" in cookie and "samesite=lax" in cookie.lower()
        assert browser.get("/api/runs").status_code == 200
    door = httpx.get(f"{address}/run/spike/?board=%22data%3E")
    assert "token" in door.text and "<script" not in door.text
    assert 'name="board" value="&quot;data&gt;"' in door.text


def page_of(home):
    """Return a page over the runs of a directory, in this process."""
    return Page(Settings(directory=home / "runs", cache=home / "cache"))


@asynccontextmanager
async def reading(page):
    """Yield a client of a page in this process."""
    transport = httpx.ASGITransport(app=page.application, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        yield http


async def _answer_path(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


def test_behind_a_proxy_the_cookie_is_for_the_page_alone():
    """Whatever the prefix is, and of whichever page the link is."""
    prefix, gate = "/user/anna/proxy/8787", Gate(_answer_path, "t" * 20, ("hub.example",))

    async def proxy(scope, receive, send):
        assert scope["path"].startswith(f"{prefix}/")
        await gate({**scope, "path": scope["path"].removeprefix(prefix)}, receive, send)

    async def browse():
        transport = httpx.ASGITransport(app=proxy)
        base = f"https://hub.example{prefix}/"
        client = httpx.AsyncClient(transport=transport, base_url=base, follow_redirects=True)
        async with client as browser:
            path = "run/lr%3D1%20b/incident/inc-1/"
            answer = await browser.get(f"{path}?token={'t' * 20}&x=time")
            assert str(answer.url) == f"{base}{path}?x=time"
            assert answer.text == "/run/lr=1 b/incident/inc-1/"
            assert [cookie.path for cookie in browser.cookies.jar] == [prefix]
            assert (await browser.get("api/runs")).status_code == 200
            away = f"?token={'t' * 20}&page=//evil.example/%0d%0ax:y"
            assert (await browser.get(away)).url.host == "hub.example"

    asyncio.run(browse())


def test_a_run_of_any_name_has_a_page_and_looking_at_many_closes_none(directory, tmp_path):
    runs = tmp_path / "runs"
    names = ["lr=1e-3 b", "50%", "a@b", *map(str, range(7))]
    for name in names:
        shutil.copytree(directory / "runs" / "spike", runs / name)
    described = json.loads((runs / "a@b" / "run.json").read_text())
    described["argv"] += ["--out", "/tmp/a", "--lr=0.1"]
    described["drills"] = [{"fault": "lr_spike", "step": 40, "params": {}}]
    (runs / "a@b" / "run.json").write_text(json.dumps(described))
    shutil.rmtree(runs / "0" / "journal")
    page = page_of(tmp_path)
    before = {name: page.curves(name)[1] for name in names}
    assert all(page.curves(name)[1] is curves for name, curves in before.items())

    async def browse():
        async with reading(page) as http:
            for name in names[:3]:
                answer = await http.get(f"/api/run/{quote(name)}")
                assert answer.json()["run"] == name
            run = (await http.get(f"/api/run/{quote('a@b')}")).json()
            assert [drill["fault"] for drill in run["drills"]] == ["lr_spike"]
            compared = await http.get("/api/compare", params={"a": "a@b", "b": "lr=1e-3 b"})
            rows = {row["name"]: row["values"] for row in compared.json()["differs"]}
            assert rows["--lr"] == {"a": "0.1", "b": "–"}
            assert (await http.get("/api/run/0")).json()["cache"] is None, "there is no journal"

    asyncio.run(browse())


def test_a_run_whose_disk_hangs_delays_no_other(directory, tmp_path, monkeypatch):
    """It is said of its own pages, and in the list, until the disk answers again."""
    for name in ("fast", "hung"):
        shutil.copytree(directory / "runs" / "spike", tmp_path / "runs" / name)
    hanging, answers = ["/hung/journal"], threading.Event()

    def hangs(call):
        def wait(path, *args, **options):
            if any(part in str(path) for part in hanging):
                answers.wait(300)
            return call(path, *args, **options)

        return wait

    monkeypatch.setattr(os, "open", hangs(os.open))
    monkeypatch.setattr(os, "stat", hangs(os.stat))
    monkeypatch.setattr("supervise.web.server.REQUEST_S", 0.5)
    monkeypatch.setattr("supervise.web.curves.TURN_S", 0.1, raising=False)
    page = page_of(tmp_path)

    async def browse():
        async with reading(page) as http:

            async def wait_for(path, find):
                async with asyncio.timeout(60):
                    while not (found := find(await http.get(path))):
                        await asyncio.sleep(0.05)
                return found

            def problems(answer):
                found = {row["run"]: row["problem"] for row in answer.json().get("runs", ())}
                return None if found.get("fast", "no row") else found

            series = "/api/run/{}/series?m=train_loss_raw"
            await wait_for(series.format("hung"), lambda answer: answer.status_code == 202)
            await wait_for(series.format("fast"), lambda answer: answer.status_code == 200)
            hanging[:] = ["/hung/"]
            late = lambda answer: answer.status_code == 503 and answer.json()["error"]  # noqa: E731
            problem = await wait_for(series.format("hung"), late)
            await wait_for("/api/run/fast", lambda answer: answer.status_code == 200)
            assert await wait_for("/api/runs", problems) == {"hung": problem, "fast": None}
            answers.set()
            await wait_for(series.format("hung"), lambda answer: answer.status_code == 200)

    try:
        asyncio.run(browse())
    finally:
        answers.set()


def test_no_row_of_the_list_waits_for_another(directory, tmp_path, monkeypatch):
    """Here each waits until all have begun, and there are more than are read at once."""
    names = {*map(str, range(6))}
    for name in names:
        shutil.copytree(directory / "runs" / "spike", tmp_path / "runs" / name)
    together, waiting, stat = threading.Barrier(len(names)), set(names), os.stat

    def wait(path, *args, **options):
        if str(path).endswith("run.json") and Path(path).parent.name in waiting:
            waiting.discard(Path(path).parent.name)
            together.wait(60)
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", wait)
    page = page_of(tmp_path)

    async def browse():
        async with reading(page) as http:
            return (await http.get("/api/runs")).json()

    rows = asyncio.run(browse())["runs"]
    assert {row["run"]: row["problem"] for row in rows} == dict.fromkeys(names)


def test_a_run_is_read_again_once_there_are_threads(directory, monkeypatch):
    async def browse():
        async with reading(page_of(directory)) as http:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                assert "not read yet" in (await http.get("/api/run/spike")).json()["error"]
            assert (await http.get("/api/run/spike")).json()["decisions"]

    asyncio.run(browse())


def refuse(thread):
    raise RuntimeError("can't start new thread")


def test_curves_are_built_once_there_are_threads(directory, tmp_path, monkeypatch):
    page = Page(Settings(directory=directory / "runs", cache=tmp_path / "cache"))
    curves = RunCurves(page.view("spike"), None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert curves.progress() == 0.0
    wait_until(lambda: curves.progress() == 1.0, "the curves")
    assert curves.facts()["frames"] == {"0": len(SPIKE)}


def test_a_log_that_grows_says_the_same_as_one_that_is_read_at_once(directory, tmp_path):
    log = shutil.copytree(directory / "runs" / "spike", tmp_path / "runs" / "spike") / "audit.log"
    lines = log.read_bytes().splitlines(keepends=True)
    page = page_of(tmp_path)
    for number in range(1, len(lines) + 1):
        log.write_bytes(b"".join(lines[:number]))
        grown, whole = page.view("spike"), page_of(tmp_path).view("spike")
        assert grown.decisions(-1) == whole.decisions(-1)
        assert grown.document() == whole.document()
    assert len(whole.records) == len(lines)
    assert [action["sentence"] for action in whole.document()["actions"] if action["sentence"]]


def copied_log(directory, home):
    """Copy the run with an incident; return the path of its log, and its records."""
    log = shutil.copytree(directory / "runs" / "spike", home / "runs" / "spike") / "audit.log"
    return log, [json.loads(line[65:]) for line in log.read_bytes().splitlines()]


def write_log(log, records):
    texts = [json.dumps(record, separators=(",", ":")) for record in records]
    log.write_text("".join(f"{'0' * 64} {text}\n" for text in texts))


def test_what_had_recovered_by_the_end_of_the_job_is_not_called_unresolved(tmp_path):
    """The page has the word of `supervise status`, which says finished."""
    (tmp_path / "small.yaml").write_text(recorded_run.SMALL)
    frames = recorded_run.make_frames(0, *[2.0] * 40, 8.0, *[2.0] * 23)
    events, policy = [*frames, Exited(75 * 10**9, 0)], tmp_path / "small.yaml"
    recorded_run.record_run(tmp_path / "runs" / "ended", events, policy=policy)
    view = page_of(tmp_path).view("ended")
    [incident] = view.document()["incidents"]
    proof = view.report("inc-1").proof.text

    assert proof.startswith("recovered so far: 18 good steps of 20; loss back in its normal range")
    assert (incident["state"], incident["unsettled"]) == ("JOB FINISHED", False)
    assert "unresolved" not in json.dumps(view.document())


def test_the_marks_of_many_incidents_take_time_in_proportion_to_the_log(directory, tmp_path):
    log, records = copied_log(directory, tmp_path)
    count, lines = 100, []
    for number in range(count):
        for record in records:
            moved = {"seq": len(lines), "event": record.get("event", -1) + 1000 * number}
            if record.get("incident"):
                moved["incident"] = f"inc-{number + 1}"
            lines.append(record | moved)
    write_log(log, lines)
    view = page_of(tmp_path).view("spike")
    before_s = time.thread_time()
    incidents = view.document()["incidents"]
    assert time.thread_time() - before_s < 1.0, "as long as the log is, it was 3 s"
    assert len(view.records) == len(lines) and len(incidents) == count
    assert {incident["title"] for incident in incidents} == {"Loss out of its limit"}
    opened = []
    with patched_open(opened):
        reports = view.reports()
    assert [*reports] == [f"inc-{number + 1}" for number in range(count)]
    assert len([path for path in opened if path.endswith(".jrn")]) < 20, "one pass, not one each"
    for name in ("inc-1", "inc-2", "inc-100"):
        assert view.report(name) == reports[name], "the saved page has what the page shows"


@contextmanager
def patched_open(opened):
    """Note in `opened` the files that this process opens."""
    is_active = True
    sys.addaudithook(
        lambda event, args: event == "open" and is_active and opened.append(str(args[0]))
    )
    yield
    is_active = False


def test_a_record_of_another_shape_hides_no_other(directory, tmp_path):
    log, records = copied_log(directory, tmp_path)
    order = next(record for record in records if record["kind"] == "intent")
    order["data"]["action"] |= {"verb": "rollback", "args": {"before_step": "x"}}
    next(r for r in records if r["kind"] == "rule")["wall"] = "0001-01-01T00:00:00+23:59"
    write_log(log, records)
    view = page_of(tmp_path).view("spike")
    document = view.document()
    assert len(view.records) == len(records)
    assert document["decisions"][0]["record"] == records[-1]["seq"]
    assert "cannot be understood" in document["problem"]
    assert view.reports().keys() <= {"inc-1"}


def test_the_list_says_where_a_run_was_rolled_back(directory, tmp_path):
    log, records = copied_log(directory, tmp_path)
    done = next(record for record in records if record["kind"] == "commit")
    done["data"]["result"] = {"from_step": 44, "step": 30, "attempt": 1}
    write_log(log, records)

    async def browse():
        async with reading(page_of(tmp_path)) as http:
            return (await http.get("/api/runs")).json()["runs"]

    [row] = asyncio.run(browse())
    assert row["rollbacks"] == [44]


def test_evidence_is_sent_in_blocks_and_a_manifest_of_another_shape_lists_nothing(
    directory, tmp_path
):
    log, _ = copied_log(directory, tmp_path)
    bundle = log.parent / "incidents" / "inc-1" / "snapshot-1"
    size = (1 << 20) + 1
    (bundle / "host.json").write_bytes(b"x" * size)
    page, path = page_of(tmp_path), "/run/spike/incident/inc-1/evidence/snapshot-1/host.json"
    status, sizes = asyncio.run(received(page, path))
    assert (status, sum(sizes)) == (200, size) and max(sizes) <= 1 << 18
    for name in (["host.json"], {}, 1, None):
        listed = [{"name": name, "bytes": 2, "sha256": "0"}]
        (bundle / "manifest.json").write_text(json.dumps({"version": 1, "files": listed}))
        assert asyncio.run(received(page, path))[0] == 404


async def received(page, path):
    """Return status and size of each part of an answer."""
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
    await page.application({**scope, "asgi": {"spec_version": "2.4"}}, receive, send)
    return sent[0]["status"], [len(message["body"]) for message in sent[1:]]


def cut_buckets(cache):
    for path in cache.rglob("rank0"):
        os.truncate(path, 100)


@pytest.mark.parametrize("harm", [shutil.rmtree, cut_buckets])
@pytest.mark.parametrize("is_list", [True, False], ids=["facts", "series"])
def test_curves_whose_cache_was_removed_are_made_again(tmp_path, harm, is_list):
    (tmp_path / "small.yaml").write_text(recorded_run.SMALL)
    record(tmp_path, "long", *[2.0] * 9000)
    page, query = page_of(tmp_path), Query(["train_loss_raw"], pixels=300)
    _, curves = page.curves("long")
    wait_until(lambda: curves.progress() == 1.0, "the curves")
    before, facts = curves.series(query), curves.facts()
    assert facts["cache"] is None
    harm(tmp_path / "cache")
    if is_list:
        assert (curves.facts()["building"], curves.facts()["frames"]) == (0.0, {})
    else:
        with pytest.raises(BuildingError):
            curves.series(query)
    wait_until(lambda: curves.progress() == 1.0, "the curves")
    assert curves.series(query) == before
    assert "in memory" in curves.facts()["cache"]
    page.close()


def test_a_second_start_reads_no_journal_again(tmp_path):
    (tmp_path / "small.yaml").write_text(recorded_run.SMALL)
    run = record(tmp_path, "long", *[2.0] * 9000)
    query = Query(["train_loss_raw"], pixels=300)
    series = []
    for _ in range(2):
        page = page_of(tmp_path)
        _, curves = page.curves("long")
        wait_until(lambda curves=curves: curves.progress() == 1.0, "the curves")
        series.append(curves.series(query))
        page.close()
        shutil.rmtree(run.journal_path, ignore_errors=True)
    assert series[0] == series[1]
    assert "from the page's cache" in curves.facts()["cache"]


def test_an_export_waits_for_a_log_that_takes_long_to_read(directory, tmp_path, monkeypatch):
    monkeypatch.setattr("supervise.web.server.REQUEST_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    page = tmp_path / "page.html"
    assert run_cli(["web", "--export", str(page), str(directory / "runs" / "spike")]) == 0
    assert 'id="frozen"' in page.read_text()


RANKS = ("train_loss_raw", "forward_time", "other_time", "backward_time", "step_time")
SLOW = ("straggler_ratio", "straggler_rank", "straggler_part")


def test_the_slow_rank_is_named_with_since_when_and_at_what(tmp_path):
    """Rank 1 reads data for 0.2 s from step 100 on, in the bucket of 96; rank 0 waits for it."""
    (tmp_path / "small.yaml").write_text(recorded_run.SMALL)
    names = {0: (*RANKS, *SLOW), 1: RANKS}
    begin = (Launched(1, 2**22 + 7, 0), *(Announced(2, rank, 2, 7, names[rank]) for rank in (0, 1)))

    def frames(steps, last):
        for step in range(steps):
            late = 0.2 if 100 <= step < last else 0.0
            for rank, (other, backward) in enumerate(((0.0, late), (late, 0.0))):
                values = (2.0, 0.04, other, 0.06 + backward, 0.1 + late)
                ranks = (1.0 + late * 10, 1.0, 2.0) if rank == 0 else ()
                yield Frame((10 + step) * 10**9 + rank, rank, 0, step, (*values, *ranks))

    for name, last, expected in (
        ("slow", 300, {"rank": 1, "since": 96}),
        ("passed", 200, {}),
    ):
        path = tmp_path / "runs" / name
        policy = tmp_path / "small.yaml"
        recorded_run.record_run(path, frames(300, last), policy=policy, begin=begin)
        _, curves = page_of(tmp_path).curves(name)
        wait_until(lambda curves=curves: curves.progress() == 1.0, "the curves")
        facts = curves.facts()
        part = facts["slow"].pop("part", "")
        assert facts["slow"] == expected
        assert ("outside" in part) == (name == "slow")
    assert facts["own_s"] == pytest.approx({"0": 0.04, "1": 0.04})
    unread = RunCurves(page_of(tmp_path).view("slow"), None)
    assert unread.facts()["slow"] is None, "not built: not known"


def test_an_export_waits_for_the_curves_and_names_the_metrics_that_it_lacks(tmp_path):
    (tmp_path / "small.yaml").write_text(recorded_run.SMALL)
    names = ("train_loss_raw", *(f"attn_entropy.{layer}" for layer in range(80)))
    begin = (Launched(1, 2**22 + 7, 0), Announced(2, 0, 1, 7, names))
    frames = [Frame((10 + step) * 10**9, 0, 0, step, (2.0,) * 81) for step in range(3000)]
    policy = tmp_path / "small.yaml"
    recorded_run.record_run(tmp_path / "runs" / "many", frames, policy=policy, begin=begin)

    async def browse():
        async with reading(page_of(tmp_path)) as http:
            return await http.get("/run/many/export.html")

    answer = asyncio.run(browse())
    assert answer.status_code == 200
    frozen = json.loads(re.search(r'id="frozen">(.*?)</script>', answer.text, re.DOTALL)[1])
    assert len(frozen["run"]["metrics"]) == 64 and len(frozen["left_out"]) == 17
    assert {*frozen["run"]["metrics"], *frozen["left_out"]} == {*names}


def test_a_board_asks_for_what_a_run_can_have():
    names = {name for board in BOARDS.values() for name in board}
    assert names <= all_metrics().keys() and names.isdisjoint(BUILD)


def test_the_address_is_printed_again_on_demand(served):
    before = len(served.lines)
    served.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: len(served.lines) >= 2 * before, "the address again")


def test_the_list_has_each_run_and_what_needs_somebody(client):
    listed = client.get("/api/runs").json()
    rows = {row["run"]: row for row in listed["runs"]}
    assert rows.keys() == {"spike", "evil", "broken"}
    assert rows["broken"]["problem"] and rows["broken"]["step"] is None
    assert rows["spike"]["state"] == "finished" and rows["spike"]["incidents"] == 1
    assert rows["spike"]["gravest"]["id"] == "inc-1"
    assert rows["spike"]["gravest"]["status"] == "recovered"
    [incident] = client.get("/api/run/spike").json()["incidents"]
    assert rows["spike"]["gravest"]["title"] == incident["title"] == "Loss out of its limit"


def test_a_request_is_listed_once_with_its_incident_and_both_answers(client, directory):
    run = record(directory, "asking", *[2.0] * 20, 8.0, ended=False)
    incident = {"id": "inc-1", "severity": "SEV1", "phase": "open", "headline": "loss 8"}
    request = {"id": "ask-1", "incident": "inc-1", "runbook": "calm", "left_s": 600}
    request |= {"steps": [{"verb": "lr_scale", "args": {"value": 0.5}}], "args_sha256": "sha256:0"}
    status = {"state": "suspect", "incidents": {"opened": 1, "open": incident}}
    run.write_json("state.json", {**status, "approvals": [{**request, "on_timeout": "deny"}]})
    audit = Audit.open(run.audit_path, run.id, at_ns=0, wall="")
    needs = client.get("/api/runs").json()["needs"]
    audit.close()
    [need] = [need for need in needs if need["run"] == "asking"]
    shutil.rmtree(run.path)
    assert (need["kind"], need["title"], need["left_s"]) == (
        "approval",
        "Loss out of its limit",
        600,
    )
    assert (
        need["text"]
        == "may calm run (multiply the learning rate by 0.5)? Without an answer it may not"
    )
    assert [step["command"].split()[1] for step in need["steps"]] == ["approve", "deny"]


def test_another_run_in_the_same_directory_is_another_run(client, directory):
    paths = [directory / "runs" / name for name in ("again", "again.old")]
    for losses in ([2.0] * 30, [3.0] * 50):
        if paths[0].exists():
            paths[0].rename(paths[1])
        record(directory, "again", *losses)
        _, [(_, values)] = decoded(curves_of(client, "again", m="train_loss_raw").content)
        assert values["train_loss_raw"][2] == tuple(losses)
    assert client.get("/api/run/again").json()["step"] == 49
    for path in paths:
        shutil.rmtree(path)
    assert client.get("/api/run/again").status_code == 404


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


def test_the_curves_are_the_frames(client):
    answer = curves_of(client, "spike", m=["train_loss_raw", "nobody"])
    header, [(x, values)] = decoded(answer.content)
    assert header["bucket"] == 1 and x[1] == tuple(range(len(SPIKE)))
    assert values["train_loss_raw"][2] == SPIKE and set(values["nobody"][3]) == {0.0}
    seconds = [b - a for a, b in zip(x[2], x[2][1:], strict=False)]
    assert seconds == pytest.approx([1.0] * (len(SPIKE) - 1))
    part = curves_of(client, "spike", m="train_loss_raw", lo=x[2][30], hi=x[2][50], x="time", px=20)
    header, [(x, values)] = decoded(part.content)
    assert header["bucket"] == 16 and max(values["train_loss_raw"][1]) == 8.0
    header, [(x, _)] = decoded(curves_of(client, "spike", m="train_loss_raw", px=2).content)
    assert header["stretches"][0]["last"] == len(SPIKE) - 1 > x[1][-1]
    header, [(x, _)] = decoded(curves_of(client, "spike", m="nobody", hi=10, px=2).content)
    assert header["stretches"][0]["last"] == x[1][-1] + header["bucket"] - 1 < len(SPIKE) - 1


IN_BUCKETS = """
const context = { COLUMNS: { step: 1 }, number: (n) => n,
  card: (title, sub, rows) => rows, h: (tag, about, rows) => rows, table: (head, rows) => rows,
  STEPS: 64 };
const [vm, fs] = [require("vm"), require("fs")];
vm.createContext(context);
for (const script of process.argv.slice(1)) {
  vm.runInContext(fs.readFileSync(script, "utf8"), context);
}
const [steps, one] = [[0, 64, 128], [1, 1, 1]];
const stretch = { attempt: 0, n: 3, last: 160, undone: [[150, 155]], x: [steps, steps],
  y: { loss: [one, one, [5, 6, 7], [64, 64, 33]] } };
const { counts, undone } = context.columns({ stretches: [stretch] }, "loss", "step");
const report = { what: { onset: { metric: "loss", step: 150 }, moves: [] },
  opened: { attempt: 0, step: 151 }, updated: { step: 160, attempt: 0 } };
const rows = (head) => context.stepTable(report, {}, [], head, ["loss"], { loss: {} });
const path = (from, ...mean) => {
  const [steps, ones] = [mean.map((_, i) => from + i), mean.map(() => 1)];
  return { counts: [steps, mean, mean, mean, ones, steps, steps], mean };
};
console.log(JSON.stringify([counts[6], undone.map((path) => path[6]),
  rows({ bucket: 64, stretches: [stretch] }), rows({ bucket: 64, stretches: [] }),
  [[path(0, 5, 4, 3, 2), path(0, 5, 3)], [path(0, 5, 4), path(7, 3)]].map((runs) =>
    context.common(runs, 1).map(({ x, step, value }) => [x, step, value]))]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the scripts of the page")
def test_a_bucket_that_has_the_trouble_in_it_is_not_taken_for_what_was_before():
    scripts = [STATIC / "charts.js", STATIC / "incident.js"]
    output = subprocess.check_output(["node", "-e", IN_BUCKETS, *scripts])
    counts, undone, steps, without, last = json.loads(output)
    assert (counts, undone) == ([0, 64], [[None, 128]]), "the newest bucket, undone in part"
    assert steps == [[None, 6, "–", 7]], "before, the first bad one, after"
    assert without == [[None, "–", "–", "–"]]
    assert last[0] == [[1, 1, 4], [1, 1, 3]], "two runs are compared where both have a step"
    assert last[1] == [[None, 1, 4], [None, 7, 3]], "nowhere: each at its own end"


LISTENING = """
const [vm, fs] = [require("vm"), require("fs")];
const [labels, urls, records, timers, sources] = [[], [], [], new Map(), []];
let started = 0;
const start = (run, ms) => (timers.set(++started, { run, ms }), started);
const end = (id) => timers.delete(id);
class EventSource {
  constructor(url) { urls.push(url); sources.push(this); }
  close() {}
}
const event = (version, ...numbers) =>
  ({ version, decisions: numbers.map((record) => ({ record })) });
const document = { hidden: false, getElementById: () => null, body: { dataset: { page: "run" } },
  addEventListener() {} };
const context = { URLSearchParams, EventSource, document,
  location: { pathname: "/run/r/", search: "" }, live: (text) => labels.push(text),
  setTimeout: start, setInterval: start, clearTimeout: end, clearInterval: end,
  fetch: async (url) => (urls.push(url), { ok: true, json: async () => event(3, 8) }) };
const after = (ms) => [...timers.values()].find((timer) => timer.ms === ms).run();
vm.createContext(context);
vm.runInContext(fs.readFileSync(process.argv[1], "utf8"), context);
context.listen("r", event(1, 5), ({ decisions }) => records.push(decisions.map((d) => d.record)));
(async () => {
  sources[0].onmessage({ data: JSON.stringify(event(2, 7, 6)) });
  await after(40000);
  await after(3000);
  await after(40000);
  sources[1].onmessage({ data: JSON.stringify(event(3, 8, 7)) });
  sources[1].onmessage({ data: JSON.stringify(event(4, 9, 8)) });
  const waits = [...timers.values()].map((t) => t.ms);
  sources[1].onerror();
  console.log(JSON.stringify([labels, urls, records, waits]));
})();
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the scripts of the page")
def test_a_page_asks_where_no_events_come_and_takes_each_record_once():
    output = subprocess.check_output(["node", "-e", LISTENING, STATIC / "data.js"])
    labels, urls, records, waits = json.loads(output)
    assert labels == ["live", "no connection", "every 3 s", "live", "live", "no connection"]
    assert urls == [
        "../../api/run/r/live?version=1&record=5",
        "../../api/run/r?version=2&record=7",
        "../../api/run/r/live?version=3&record=8",
    ]
    assert records == [[7, 6], [8], [9]]
    assert waits == [40000], "it asks no more"


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the scripts of the page")
def test_the_scripts_show_what_a_run_says_and_what_comes_later():
    names = ("dom.js", "charts.js", "incident.js", "run.js")
    command = ["node", Path(__file__).with_name("scripts.mjs"), *(STATIC / name for name in names)]
    drawn = json.loads(subprocess.check_output(command))
    assert "cannot be read" in drawn["verdict"] and "constructor" in drawn["verdict"]
    assert "valueOf" in drawn["checks"], "no method of an object is taken for a state"
    suspect = drawn["suspect"]
    assert "verified, suspect" in suspect and "not for going back" in suspect
    assert '"good"' not in suspect, "what an incident made suspect is not shown as good"
    assert "step 1" in drawn["head"], "of an incident without a time of day"
    assert "no step was made yet" in drawn["before"] and drawn["charts"] == ["loss"]
    commands, ended, cut, tagged = drawn["redrawn"]
    assert commands[0] and ended[1] and cut[2] and tagged[2], (
        "each part when what it shows has changed"
    )
    assert drawn["rolled"].count('"line"') == 1 and 'rolled back 1 time"' in drawn["rolled"]
    assert drawn["ranks"] == [True, False, None], "a saved page has the curves of one rank"


def test_the_page_of_a_run_has_what_the_commands_say(client):
    page = client.get("/api/run/spike").json()
    [incident] = page["incidents"]
    assert (incident["id"], incident["severity"], incident["phase"]) == ("inc-1", "SEV1", "closed")
    assert [action["verb"] for action in page["actions"]][:1] == ["lr_scale"]
    assert {rule["id"] for rule in page["rules"]} == {"spike", "grad", "odd", "blind"}
    assert [checkpoint["name"] for checkpoint in page["checkpoints"]] == ["last.pt"]
    assert page["building"] == 1 and page["boards"]["icu"] == ["train_loss_raw", "grad_global_norm"]
    assert page["decisions"][0]["record"] > page["decisions"][-1]["record"]
    chief = [row["text"] for row in page["decisions"] if row["is_chief"]]
    assert "inc-1 opened: Loss out of its limit" in chief
    assert [text for text in chief if text.startswith("learning rate")], "as the card says it"
    assert not [text for text in chief if "ack_step" in text]
    report = client.get("/api/run/spike/incident/inc-1").json()
    assert report["schema"] == "supervise/incident/v1" and report["state"] == incident["state"]
    differs = client.get("/api/compare", params={"a": "spike", "b": "evil"}).json()
    assert differs["differs"] == [] and differs["same"] >= 3
    assert report["files"] == [], "no bundle is in the record"


def test_evidence_is_a_download_of_what_its_manifest_lists(client):
    answer = client.get("/run/spike/incident/inc-1/evidence/snapshot-1/host.json")
    assert answer.content == b"{}" and answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["content-security-policy"].startswith("sandbox")


def test_what_the_page_loads_is_there(client):
    linked = re.findall(r"""(?:href|src)="[./]*(static/[^"]+)""", client.get("/run/spike/").text)
    assert "static/style.css" in linked, "the sheet of the reports"
    answers = [client.get(f"/{path}") for path in linked]
    assert {answer.status_code for answer in answers} == {200}
    again = client.get(answers[-1].url, headers={"If-None-Match": answers[-1].headers["etag"]})
    assert again.status_code == 304


def test_a_hostile_name_stays_text_and_the_export_holds_no_token(client, served):
    answer = client.get("/api/run/evil")
    assert answer.headers["content-type"] == "application/json"
    wait_until(lambda: client.get("/api/run/evil").json()["building"] == 1)
    assert any(EVIL[:20] in name for name in client.get("/api/run/evil").json()["metrics"])
    page = client.get("/run/evil/export.html")
    assert page.status_code == 200 and "<script>alert" not in page.text
    assert "Content-Security-Policy" in page.text
    for secret in (served.found(r"token=([\w-]+)"), served.found(r"commands: ([\w-]+)")):
        assert secret not in page.text
    frozen = json.loads(re.search(r'id="frozen">(.*?)</script>', page.text, re.DOTALL)[1])
    assert frozen["run"]["run"] == "evil" and frozen["incidents"].keys() == {"inc-1"}
    page = client.get("/run/evil/record.html", timeout=60)
    assert page.status_code == 200 and "<script" not in page.text
    assert "style-src 'sha256-" in page.headers["content-security-policy"]


def test_a_page_gets_what_is_new(client, directory):
    run = record(directory, "live", *[2.0] * 20, ended=False)
    judge = recorded_run.Judge(run, directory / "small.yaml")
    judge.judge(*recorded_run.BEGIN, *recorded_run.make_frames(0, *[2.0] * 20))
    path = "/api/run/live"
    whole = wait_until(lambda: (a := client.get(path).json())["building"] == 1 and a)
    assert whole["decisions"] and not whole["incidents"] and whole["frames"] == {"0": 40}
    newest = {"version": whole["version"], "record": whole["decisions"][0]["record"]}
    same = client.get(path, params=newest).json()
    assert same == {"version": whole["version"], "decisions": [], "operator": "anna"}
    assert client.get(path, params={**newest, "version": 1}).json().keys() == whole.keys()
    judge.judge(*recorded_run.make_frames(20, 8.0, 2.0, 2.0))
    sent = [f"console: printed {number}" for number in range(250)]  # between two looks
    for text in sent:
        judge.recorder.note("notify_result", 22, text, {"channel": "console"})
    judge.recorder.close()
    changed = client.get(path, params=newest).json()
    assert [row["text"] for row in changed["decisions"]][: len(sent)] == sent[::-1]
    assert changed["decisions"][-1]["record"] == newest["record"] + 1, "none is left out"
    assert changed["incidents"] and changed["frames"]["0"] > 40
    assert "rules" not in changed, "only what is new"
    for wrong in ({"version": "x"}, {"record": ""}):
        assert client.get(path, params=wrong).status_code == 400


def events_of(answer):
    """Yield the documents of a stream."""
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_a_stream_sends_what_is_new(client, directory):
    run = record(directory, "stream", *[2.0] * 20, ended=False)
    judge = recorded_run.Judge(run, directory / "small.yaml")
    judge.judge(*recorded_run.BEGIN, *recorded_run.make_frames(0, *[2.0] * 20))
    path = "/api/run/stream"
    whole = wait_until(lambda: (a := client.get(path).json())["building"] == 1 and a)
    newest = {"version": whole["version"], "record": whole["decisions"][0]["record"]}
    sent = [f"console: printed {number}" for number in range(250)]  # between two looks
    texts, documents = [], []
    with client.stream("GET", f"{path}/live", params=newest, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = events_of(answer)
        assert next(events)["decisions"] == [], "at once: nothing holds it back"
        judge.judge(*recorded_run.make_frames(20, 8.0, 2.0, 2.0))
        for text in sent:
            judge.recorder.note("notify_result", 22, text, {"channel": "console"})
        judge.recorder.close()
        while sent[-1] not in texts:
            documents.append(next(events))
            texts += [row["text"] for row in documents[-1]["decisions"][::-1]]
    assert [text for text in texts if text in sent] == sent, "each once, in order"
    assert documents[-1]["frames"]["0"] > 40 and "rules" not in documents[-1]
    assert any(document.get("incidents") for document in documents)
    assert client.get(f"{path}/live", params={"version": "x"}).status_code == 400
    assert client.get("/api/run/none/live").status_code == 404


def test_there_is_a_limit_of_streams_and_one_that_ends_makes_room(client):
    with ExitStack() as stack:
        opened = [stack.enter_context(client.stream("GET", LIVE)) for _ in range(32)]
        assert {answer.status_code for answer in opened} == {200}
        answer = client.get(LIVE)
        assert answer.status_code == 503 and "32 live views" in answer.json()["error"]
    wait_until(lambda: stream_status(client) == 200, "the end of streams whose reader is gone")


LIVE = "/api/run/spike/live"


def stream_status(client):
    with client.stream("GET", LIVE) as answer:
        return answer.status_code


def test_a_stream_ends_with_the_server_and_says_that_it_is_there(directory, monkeypatch):
    monkeypatch.setattr("supervise.web.server.LIVE_S", 0.01)
    monkeypatch.setattr("supervise.web.server.STILL_S", 0.05)
    page = page_of(directory)
    wait_until(lambda: page.curves("spike")[1].progress() == 1.0, "the curves")

    async def end_later():
        await asyncio.sleep(0.5)
        page.is_ending.set()

    async def look():
        return (await asyncio.gather(received(page, LIVE), end_later()))[0]

    status, sizes = asyncio.run(asyncio.wait_for(look(), 10))
    assert status == 200 and len(sizes) > 3, "signs of life of a run that has ended"
    assert max(sizes[1:]) < sizes[0] / 10, "without what is known"


def test_the_server_ends_with_open_streams(directory):
    server = Served(directory / "runs", "--no-token")
    try:
        address = server.found(r"(http://127.0.0.1:\d+)/")
        with httpx.stream("GET", f"{address}{LIVE}", timeout=60) as answer:
            events = events_of(answer)
            next(events)
            server.process.terminate()
            assert [*events] == [], "in order: a connection that is cut raises"
    finally:
        server.close()


def test_a_command_is_the_operators_and_in_the_audit_log(client, directory, headers):
    run = record(directory, "held", *[2.0] * 20, ended=False)
    judge, over = recorded_run.Judge(run, directory / "small.yaml"), threading.Event()

    def supervisor():
        inbox = ControlInbox(run.path, time.monotonic_ns)
        while not over.wait(0.01):
            judge.judge(*inbox.poll())

    thread = threading.Thread(target=supervisor)
    thread.start()
    try:
        path = "/api/run/held/command"
        for body in ({"command": "rm"}, {"command": "approve", "args": {"id": "ask-1"}}, []):
            assert client.post(path, headers=headers, json=body).status_code == 400
        order = {"command": "silence", "args": {"rule": "grad", "for": 50}}
        answer = client.post(path, headers=headers, json=order, timeout=60).json()
    finally:
        over.set()
        thread.join()
        judge.recorder.close()
    assert answer["outcome"] == "done" and "anna" in answer["records"][0]["text"]
    assert '"via":"web"' in run.audit_path.read_text()
    assert client.post(path, headers=headers, json=order).status_code == 409, "it has ended"


def test_tags_and_notes_stay_beside_the_runs(client, directory, headers):
    note = {"tags": ["baseline"], "note": "the good one"}
    assert client.put("/api/run/spike/note", headers=headers, json=note).json() == note
    rows = {row["run"]: row for row in client.get("/api/runs").json()["runs"]}
    assert (rows["spike"]["tags"], rows["spike"]["note"]) == (["baseline"], "the good one")
    assert rows["evil"]["tags"] == []
    page = client.get("/api/run/spike").json()
    assert {name: page[name] for name in note} == note
    kept = directory / "state" / "supervise" / "notes" / f"{page['id']}.json"
    assert json.loads(kept.read_text()) == note
    for wrong in ({"tags": "a", "note": ""}, {"tags": []}):
        assert client.put("/api/run/spike/note", headers=headers, json=wrong).status_code == 400


def test_a_socket_of_its_owner_needs_no_token(directory):
    path = directory / "page.sock"
    server = Served(directory / "runs" / "spike", "--uds", path)
    try:
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost:8787"
        ) as http:
            assert [row["run"] for row in http.get("/api/runs").json()["runs"]] == ["spike"]
            assert http.get("/api/run/evil").status_code == 404, "one run was named"
    finally:
        server.close()


def test_an_address_for_all_and_a_missing_package_are_refused(directory, monkeypatch, capsys):
    assert run_cli(["web", str(directory / "runs"), "--host", "0.0.0.0"]) == 64
    assert "there is no TLS" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "supervise.web.server", raising=False)
    assert run_cli(["web", str(directory / "runs")]) == 64
    assert "supervise-train[web]" in capsys.readouterr().err


NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no browser: apt install chromium")
def test_a_browser_draws_a_run_without_a_message(served, address, tmp_path):
    """Facts, charts and lanes are there, hostile names are text, and the console is empty."""
    token = served.found(r"token=([\w-]+)")
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={tmp_path}", "--enable-logging=stderr", "--virtual-time-budget=60000"),
        *("--window-size=1280,3000", "--dump-dom", f"{address}/run/evil/?board=all&token={token}"),
    ]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    assert re.findall(r".*CONSOLE.*", drawn.stderr) == []
    assert 'data-ready="curves"' in drawn.stdout and drawn.stdout.count("<canvas") == 3
    assert "lowest 2 at step 0, highest 8 at step 40" in drawn.stdout
    assert "&lt;script&gt;alert(1)" in drawn.stdout and "<script>alert" not in drawn.stdout
    assert 'class="lane"' in drawn.stdout


STEPS = [
    {"text": "stop it", "command": "supervise stop 'runs/a b'"},
    {"text": "its card; <b>two</b> lines"},
    {"command": "supervise -- python train.py --note 'a; b' '<OPTION>'"},
]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no browser: apt install chromium")
def test_each_step_of_an_advice_has_its_command_to_copy(tmp_path):
    script = (Path(supervise.web.__file__).parent / "static/dom.js").read_text()
    page = tmp_path / "page.html"
    page.write_text(
        f"<main></main><script>{script}; MAIN.append(advised({json.dumps(STEPS)}))</script>"
    )
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={tmp_path}", "--dump-dom", str(page)),
    ]
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    main = drawn.stdout[drawn.stdout.index("<main>") : drawn.stdout.index("</main>")]
    assert [html.unescape(text) for text in re.findall("<code>(.*?)</code>", main, re.DOTALL)] == [
        "supervise stop 'runs/a b'",
        "supervise -- python train.py --note 'a; b' '<OPTION>'",
    ]
    assert main.count("<li>") == 3 and "<li>its card; &lt;b&gt;two&lt;/b&gt; lines</li>" in main
