"""Which runs there are, and which one a command means."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from supervise.core.model import Exited, Launched
from supervise.runtime import start_ticks
from supervise.store import RunDir, add_run

FIRST = "20260105-101112-7f3a9c"
SECOND = "20260106-081500-0b44d1"


@pytest.fixture
def runs(recorded, alive, tmp_path, monkeypatch):
    """A function that puts a run into ./runs under a name; each is newer than those before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    bare = recorded([Launched(1, 2**22 + 7, 0), Exited(2, 0)], end=0).path.rename(tmp_path / "bare")
    (tmp_path / "runs").mkdir()

    def put(name, *, end=0, live=False, **files):
        path = tmp_path / "runs" / name
        if end == 3:
            recorded().path.rename(path)
        else:
            shutil.copytree(bare, path)
        stamp = 1_700_000_000 + len(list(path.parent.iterdir()))
        os.utime(path / "run.json", (stamp, stamp))
        for file, content in files.items():
            (path / f"{file}.json").write_text(json.dumps(content))
        log = path / "audit.log"
        if end is None or live:
            *lines, _ = log.read_bytes().splitlines(keepends=True)  # without its `run_end`
            log.write_bytes(b"".join(lines))
        elif end == 78:
            log.write_bytes(log.read_bytes().replace(b'"exit_code":0', b'"exit_code":78'))
        if live:
            alive(RunDir.open(path))
        return path

    return put


def test_the_list_shows_of_each_run_how_it_is(supervise, runs):
    own = {"attempt": 0, "pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    training = {"state": "HEALTHY", "training": {"loss": 2.625}, "step": 41}
    training |= {"policy": "medium", "mode": "enforce"}
    runs("a", end=3)
    runs("b", end=0)
    runs("c", end=78)
    runs("d", end=None, launch=own)
    runs("e", end=None)
    runs("f", live=True, state=training)
    runs("g", end=0, run={"run": 7})

    code, out, err = supervise("runs")

    assert (code, err) == (0, "")
    assert [line.split("  ")[0] for line in out.splitlines()[1:]] == [
        f"runs/{n}" for n in "gfedcba"
    ]
    rows = {row["run"]: row for row in json.loads(supervise("runs", "--json")[1])}
    states = ["unknown", "running", "lost", "unsupervised", "stopped", "finished", "crashed"]
    assert [row["state"] for row in rows.values()] == states
    assert "does not describe a run" in rows["g"]["problem"]
    live, crashed = rows["f"], rows["a"]
    assert (live["step"], live["loss"], live["policy"]) == (41, 2.625, "medium")
    assert (crashed["exit_code"], crashed["step"], crashed["incidents"]) == (3, 119, 1)
    assert crashed["gravest"]["id"] == "inc-1" and crashed["gravest"]["severity"] == "SEV0"
    line = next(line for line in out.splitlines() if line.startswith("runs/a "))
    assert "crashed (3)" in line and "SEV0 inc-1" in line and "nano (enforce)" in line
    only = supervise("runs", "--state", "crashed", "--json")[1]
    assert [row["run"] for row in json.loads(only)] == ["a"]


def test_a_run_is_the_newest_one_or_what_its_name_begins_with(supervise, runs):
    runs(FIRST, run={"run": "older"})
    runs(SECOND, run={"run": "newer"})

    for given in ((), f"runs/{SECOND}", SECOND, "20260106", "0b4", "runs/20260106"):
        code, out, err = supervise("status", *([given] if given else ()), "--json")
        assert (code, err) == (0, "")
        assert json.loads(out)["run"] == "newer", given
    assert json.loads(supervise("status", "7f3a", "--json")[1])["run"] == "older"


def test_several_runs_of_that_name_are_a_choice_of_commands(supervise, runs):
    runs(FIRST)
    runs("20260105-220000-c0ffee")
    code, out, err = supervise("status", "2026", "--json")

    assert (code, out) == (64, "")
    assert "2 runs are called 2026" in err
    assert "    try: supervise status runs/20260105-220000-c0ffee --json\n" in err
    assert f"         supervise status runs/{FIRST} --json\n" in err
    assert f"did you mean runs/{FIRST}?" in supervise("status", "20260105-101112-7f3a9d")[2]


def test_what_acts_on_a_job_takes_no_run_by_chance(supervise, runs):
    runs("20260101-000000-aaaaaa", live=True)
    runs("20260102-000000-bbbbbb", live=True)
    runs(FIRST)

    code, _, err = supervise("pause", "--by", "anna")
    assert (code, "2 runs have a supervisor" in err) == (64, True)
    assert "try: supervise pause runs/20260102-000000-bbbbbb --by anna\n" in err
    assert "     supervise pause runs/20260101-000000-aaaaaa --by anna\n" in err


def test_an_incident_alone_is_one_of_the_newest_run(supervise, runs):
    older = runs(FIRST, end=3)
    for argv in (("inc-1",), (), (FIRST, "inc-1"), (older,)):
        code, out, err = supervise("why", *argv)
        assert (code, err) == (0, ""), err
        assert "inc-1" in out
    assert f"runs/{FIRST}" in supervise("why")[1]
    code, _, err = supervise("why", "inc-9")
    assert (code, "no incident 'inc-9'" in err) == (64, True)
    assert "did you mean 'inc-1'? it has inc-1" in err
    runs(SECOND)
    assert "no incident 'inc-1'" in supervise("why", "inc-1")[2]


@pytest.fixture
def elsewhere(recorded, tmp_path, monkeypatch):
    """A run with a directory of its own, away from here, where another run is."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = recorded()
    (tmp_path / "projects").mkdir()
    moved = RunDir(run.path.rename(tmp_path / "projects" / "main"), run.id)
    add_run(moved, os.environ)
    here = tmp_path / "here"
    shutil.copytree(moved.path, here / "runs" / FIRST)
    (here / "runs" / FIRST / "run.json").write_text(json.dumps({"run": FIRST}))
    monkeypatch.chdir(here)
    return moved


def test_a_run_elsewhere_is_found_by_id_and_name(supervise, elsewhere):
    for given in (elsewhere.id, elsewhere.id[-6:], elsewhere.id[:-3], "main", elsewhere.path):
        code, out, err = supervise("status", given, "--json")
        assert (code, err) == (0, ""), given
        assert json.loads(out)["run"] == elsewhere.id
    code, _, err = supervise("lr", elsewhere.id, "0.5")
    assert f"{elsewhere.path} has no supervisor" in err
    assert json.loads(supervise("status", "--json")[1])["run"] == FIRST  # the newest of here


def test_an_entry_that_is_out_of_date_is_told_and_never_followed(supervise, elsewhere):
    """It holds another run by now; the hint names no other run."""
    (elsewhere.path / "run.json").write_text(json.dumps({"run": "20270101-000000-ffffff"}))

    code, _, err = supervise("status", elsewhere.id)

    assert code == 64 and f"was in {elsewhere.path}, and is not there any more" in err
    assert FIRST not in err
    assert FIRST not in supervise("status", "20251231-235959-abcdef")[2]


def test_an_id_is_found_under_runs_without_an_index(supervise, elsewhere, monkeypatch):
    """As another user, or on another machine that shares the directory."""
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    shutil.copytree(elsewhere.path, "runs/main")

    assert json.loads(supervise("status", elsewhere.id, "--json")[1])["run"] == elsewhere.id
