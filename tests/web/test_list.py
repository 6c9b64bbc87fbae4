"""The list of runs: each has its row, its page and its tags, and none waits for another."""

import asyncio
import json
import os
import shutil
import threading
from pathlib import Path
from urllib.parse import quote

from supervise.store import Audit
from tests.support.web_page import (
    copied_log,
    curves_of,
    decoded,
    page_of,
    reading,
    record,
    write_log,
)


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
    settled = {"what": "expired", "id": "ask-1", "operator": "", "args_sha256": "sha256:0"}
    settled |= {"policy": "sha256:0", "runbook": "calm"}
    body = {"attempt": 0, "event": 1, "reason": "replaced", "incident": "inc-1", "data": settled}
    audit.append("approval", actor="engine", at_ns=1, wall="", step=21, body=body, sync=False)
    later = client.get("/api/runs").json()["needs"]
    audit.close()
    [need] = [need for need in needs if need["run"] == "asking"]
    kinds = [need["kind"] for need in later if need["run"] == "asking"]
    shutil.rmtree(run.path)
    assert "approval" not in kinds, "another request has replaced it, which no status has yet"
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
