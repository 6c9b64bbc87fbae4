"""`supervise gc`: the disk space of runs that are over, and nothing of any other."""

from __future__ import annotations

import json
import os
import re
import time

import pytest

from supervise.runtime import start_ticks
from supervise.store import RunDir
from tests.cli.conftest import story

DAY_S = 86400.0
PARTS = ("savepoints", "journal", "output", "incidents")


@pytest.fixture
def aged(recorded, tmp_path):
    """A function that records a run of some age in `runs`, with evidence and a savepoint."""

    def make(name: str, days: float, **more):
        run = recorded(**more)
        bundle = "incidents/inc-1/snapshot-1/manifest.json"
        for part in ("savepoints/3.bin", "output/output.log", bundle):
            path = run.path / part
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * 5000)
        at_s = time.time() - days * DAY_S
        os.utime(run.audit_path, (at_s, at_s))
        home = tmp_path / "runs" / name
        home.parent.mkdir(exist_ok=True)
        return run.path.rename(home)

    return make


def test_it_frees_what_only_a_run_that_goes_on_needs(supervise, aged, monkeypatch, tmp_path):
    """What was decided, and why, stays. That is no tampering; what needs the journal says so."""
    old, new = aged("old", 40), aged("new", 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    curves = tmp_path / "cache" / "supervise" / "pyramids"
    for run in (old, new):
        (curves / RunDir.open(run).id).mkdir(parents=True)
    code, out, _ = supervise("gc", "--keep", 0, "--dry-run", old.parent)
    assert (code, (old / "journal").is_dir()) == (0, True)
    assert re.search(r"new +2\.0 days +kept: not old enough", out)
    assert re.search(r"old +40\.0 days +savepoints .*, journal .*, output .*, incidents ", out)

    freed = out.splitlines()[-1].replace("would free", "freed")
    planned = json.loads(supervise("gc", "--keep", 0, "--dry-run", "--json", old.parent)[1])
    (row,) = [row for row in planned["runs"] if row["path"] == str(old)]
    assert [part["name"] for part in row["parts"]] == list(PARTS)
    assert planned["dry_run"] and planned["freed_bytes"] > 0 and row["error"] is None
    code, out, _ = supervise("gc", "--keep", 0, old.parent)
    assert (code, out.splitlines()[-1]) == (0, freed)
    assert not any((old / part).exists() for part in PARTS)
    assert (new / "journal").is_dir()
    assert [path.name for path in curves.iterdir()] == [RunDir.open(new).id]
    rows = json.loads((old / "retention.json").read_text())["removed"]
    assert [row["part"] for row in rows] == list(PARTS)

    assert supervise("why", old)[0] == 0
    assert "ended with code 3" in supervise("status", old)[1]
    code, out, _ = supervise("audit", "verify", old)
    assert code == 0 and "journal: unchecked: removed by `supervise gc` at 20" in out
    code, _, err = supervise("replay", old)
    assert code != 0 and "`supervise gc` removed it" in err
    assert "kept: nothing to remove" in supervise("gc", "--keep", 0, old.parent)[1]


def test_nothing_of_a_living_or_an_unfinished_run_is_removed(supervise, aged, alive, tmp_path):
    watched, _ = aged("watched", 40), aged("unfinished", 42, events=story()[:-1], end=None)
    living, elsewhere = aged("alive", 41, end=None), aged("elsewhere", 43, end=None)
    described = json.loads((elsewhere / "run.json").read_text())
    (elsewhere / "run.json").write_text(json.dumps(described | {"host": "another"}))
    made = {"attempt": 0, "pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    (living / "launch.json").write_text(json.dumps(made))
    alive(RunDir.open(watched))
    os.utime(watched / "audit.log", (1, 1))
    (tmp_path / "runs" / "latest").symlink_to(living)

    code, out, _ = supervise("gc", "--keep", 0, "--older-than", "1h", tmp_path / "runs")
    assert (code, out.splitlines()[-1]) == (0, "freed 0 B of 5 runs")
    for text in ("is watched", "its job lives", "its supervisor died with inc-1 open"):
        assert f"kept: {text}" in out
    assert "kept: did not end, on" in out and "kept: a symbolic link" in out
    assert all((tmp_path / "runs" / name / "journal").is_dir() for name in ("watched", "alive"))


def test_the_newest_runs_stay_whole(supervise, aged):
    for name, days in (("a", 50), ("b", 60), ("c", 70)):
        aged(name, days)
    runs = aged("d", 80).parent

    out = supervise("gc", "--keep", 3, runs)[1]
    assert out.count("kept: one of the newest 3") == 3
    assert not (runs / "d" / "journal").exists()


def test_an_age_needs_a_unit(supervise):
    assert "is not a time with a unit" in supervise("gc", "--older-than", "30")[2]
