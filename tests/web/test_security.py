"""The page over HTTP: who may ask, and what a hostile name becomes."""

import asyncio
import json
import re
import signal
import sys
import threading
import time
from functools import partial

import httpx
import pytest

from supervise.cli import invoke as run_cli
from supervise.runtime import ControlInbox
from supervise.web import Gate
from tests.support import recorded_run
from tests.support.waiting import wait_until
from tests.support.web_page import EVIL, OURS, Served, record

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


def test_the_address_is_printed_again_on_demand(served):
    before = len(served.lines)
    served.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: len(served.lines) >= 2 * before, "the address again")


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
