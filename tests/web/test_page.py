"""The page of a run over HTTP: what it shows, sends when it is new, and exports."""

import asyncio
import html
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

import supervise.web
from supervise.cli import invoke as run_cli
from supervise.core.model import Announced, Exited, Frame, Launched
from tests.support import recorded_run
from tests.support.waiting import wait_until
from tests.support.web_page import (
    STATIC,
    Served,
    copied_log,
    page_of,
    reading,
    record,
    refuse,
    write_log,
)


def test_a_run_is_read_again_once_there_are_threads(directory, monkeypatch):
    async def browse():
        async with reading(page_of(directory)) as http:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                assert "not read yet" in (await http.get("/api/run/spike")).json()["error"]
            assert (await http.get("/api/run/spike")).json()["decisions"]

    asyncio.run(browse())


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
        for entry in records:
            moved = {"seq": len(lines), "event": entry.get("event", -1) + 1000 * number}
            if entry.get("incident"):
                moved["incident"] = f"inc-{number + 1}"
            lines.append(entry | moved)
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


def test_an_export_waits_for_a_log_that_takes_long_to_read(directory, tmp_path, monkeypatch):
    monkeypatch.setattr("supervise.web.server.REQUEST_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    page = tmp_path / "page.html"
    assert run_cli(["web", "--export", str(page), str(directory / "runs" / "spike")]) == 0
    assert 'id="frozen"' in page.read_text()


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
    [(begin, end), (_, newest)] = drawn["around"]
    assert begin < 120 and 307 <= end < 320, "an incident is drawn up to its end and a little more"
    assert 400 <= newest < 470, "of a long one that is open its beginning can be seen"
    assert drawn["open"] == [[150, 300]], "an open incident is shaded in a window of its own"
    assert drawn["outcomes"] == ["recovered", "unresolved at the end"]
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
