"""The evidence bundle."""

import csv
import hashlib
import json
import math
import re
import shutil
import subprocess
from types import SimpleNamespace

import msgspec
import pytest

from supervise.core.model import NOTHING, Frame, Payload
from supervise.errors import ActionError
from supervise.report import Action, outcome_text
from supervise.runtime import Evidence

from .conftest import FakeWitness, view

FILES = ("stacks.txt", "rng.json", "batches.json")


def answers(directory, rank):
    for name in FILES:
        (directory / f"rank-{rank}-{name}").write_text(f"{rank} {name}\n")


def manifest(path):
    return json.loads((path / "manifest.json").read_text())


def test_the_manifest_accounts_for_every_file(bundle, hung):
    job = FakeWitness([hung().pid], {0: view(1)}, answers)
    seen, path = bundle(job, key="k1")

    assert seen.path == "incidents/inc-1/snapshot-1"
    assert seen.sha256 == hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
    listed = {entry["name"]: entry for entry in manifest(path)["files"]}
    assert set(listed) | {"manifest.json"} == {entry.name for entry in path.iterdir()}
    assert set(listed) == set(seen.files) >= {f"rank-0-{name}" for name in FILES}
    for name, entry in listed.items():
        data = (path / name).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert seen.bytes == sum(entry.stat().st_size for entry in path.iterdir())
    assert list(path.parent.iterdir()) == [path]

    # After a crash the action may run again; another key makes another bundle.
    assert bundle(job, key="k1")[0] == seen
    assert bundle(job, key="k2")[0].path == "incidents/inc-1/snapshot-2"
    assert len(job.asked) == 2


def test_the_metric_window_keeps_absent_and_nan_apart_and_holds_no_formula(bundle):
    """The job may call a metric what it likes; a spreadsheet would run it."""
    window = [
        (("loss", "=cmd|'/C calc'!A0"), Frame(1000, 0, 0, 7, (2.5, None))),
        (("loss", "-norm"), Frame(2000, 0, 0, 8, (math.nan, -0.1))),
    ]
    _, path = bundle(FakeWitness([]), window=lambda: window)

    assert list(csv.reader((path / "metrics.csv").read_text().splitlines())) == [
        ["step", "rank", "attempt", "at_ns", "loss", "'=cmd|'/C calc'!A0", "'-norm"],
        ["7", "0", "0", "1000", "2.5", "", ""],
        ["8", "0", "0", "2000", "nan", "", "-0.1"],
    ]


def test_secrets_are_replaced_and_named(bundle, hung, tmp_path):
    log = tmp_path / "train.log"
    log.write_text("login with verysecretvalue ok\n")
    job = hung(MY_TOKEN="verysecretvalue", PLAIN="seen")

    _, path = bundle(FakeWitness([job.pid], {0: view(1)}, answers), logs=[log])

    assert "MY_TOKEN" in manifest(path)["redacted"]
    environment = json.loads((path / "environment.json").read_text())
    assert (environment["MY_TOKEN"], environment["PLAIN"]) == ("<redacted>", "seen")
    assert next(path.glob("log-*-train.log")).read_text() == "login with <redacted> ok\n"
    assert not any(b"verysecretvalue" in file.read_bytes() for file in path.iterdir())


def test_the_end_of_output_that_goes_to_a_file_is_found_from_a_line_on(bundle, tmp_path):
    """`supervise -- … > train.log 2>&1`: the log is known without being told; pipes are not."""
    log = tmp_path / "train.log"
    with log.open("w") as out:
        job = subprocess.Popen(["sleep", "60"], stdout=out, stderr=subprocess.PIPE)
    try:
        log.write_text("".join(f"line {n}\n" for n in range(10_000)))
        _, path = bundle(FakeWitness([job.pid]))
    finally:
        job.kill()
        job.communicate()

    (tail,) = path.glob("log-*")
    first, *_, last = tail.read_text().splitlines()
    assert tail.name.endswith("-train.log") and last == "line 9999"
    assert first in {f"line {n}" for n in range(1000, 10_000)}


def test_a_change_of_the_code_is_named_and_hashed_but_not_copied(bundle, tmp_path):
    """Two runs with the same change have the same hash; the change itself may hold secrets."""
    code = tmp_path / "code"
    code.mkdir()

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        return subprocess.check_output(["git", *who, *words], cwd=code)

    git("init")
    (code / "train.py").write_text("one\n")
    git("add", ".")
    git("commit", "-m", "first")
    (code / "train.py").write_text("two\n")
    (code / "new.py").touch()
    _, path = bundle(FakeWitness([]), directory=code)

    facts = json.loads((path / "git.json").read_text())
    assert facts["dirty"] == [" M train.py", "?? new.py"]
    assert facts["diff_sha256"] == hashlib.sha256(git("diff", "HEAD")).hexdigest()


def test_a_hung_job_still_gives_a_bundle_with_its_stacks(bundle, hung, tmp_path):
    """The probe does not answer, so its signal handler is used, and the rest is said missing."""
    job = hung(tmp_path / "run" / "probe")
    window = [(("loss",), Frame(2000, 0, 0, 8, (1.0,)))]

    seen, path = bundle(
        FakeWitness([job.pid], {0: view(job.pid, silent_s=99)}), window=lambda: window
    )

    # It has only just started: what that computed is in the sample, too.
    assert re.match(r"rank 0 (waits|computes) at <string>:\d+ in <lambda>", seen.standstill)
    assert seen.standstill.endswith(", after step 8")
    assert (path / f"stacks-{job.pid}.txt").read_text().count("in stuck_in_here") == 2
    assert [gap["what"] for gap in manifest(path)["missing"]] == [
        "stacks, random state and batch fingerprints from the probe of rank 0"
    ]


@pytest.mark.skipif(shutil.which("py-spy") is not None, reason="py-spy is installed here")
def test_without_any_way_in_the_kernels_view_remains(bundle, hung):
    job = hung()

    _, path = bundle(FakeWitness([job.pid]))

    kernel = (path / "kernel.txt").read_text()
    assert kernel.startswith(f"process {job.pid}\n  thread {job.pid} python")
    assert "sleeping" in kernel
    why = "the probe registered no handler for it; py-spy is not installed"
    what = f"Python stacks of process {job.pid}"
    assert manifest(path)["missing"] == [{"what": what, "why": why}]


def test_a_half_written_answer_is_not_evidence(bundle, hung):
    def fails(directory, rank):
        (directory / f"rank-{rank}-rng.json").write_text('{"half')
        return "no space left"

    seen, path = bundle(FakeWitness([hung().pid], {0: view(1)}, fails))

    assert "rank-0-rng.json" not in seen.files
    assert "no space left" in {gap["why"] for gap in manifest(path)["missing"]}


def test_a_dead_job_and_a_stuck_loop_cost_only_what_they_would_have_given(bundle, tmp_path):
    """And an incident of whatever name has its bundle inside of the run directory."""
    seen, path = bundle(FakeWitness([], loop=False), incident="../../x y")

    assert {"host.json", "git.json", "environment.json", "metrics.csv"} <= set(seen.files)
    assert {"ranks", "metrics"} <= set(seen.missing)
    assert path.resolve().is_relative_to(tmp_path / "run" / "incidents")


def test_a_full_disk_fails_the_bundle_and_leaves_nothing(tmp_path):
    mount = tmp_path / "full"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        (mount / "filler").write_bytes(b"x" * 48 * 1024)
        window = [(("loss",), Frame(n, 0, 0, n, (float(n),))) for n in range(2000)]
        evidence = Evidence(mount / "incidents", mount, lambda: window, directory=tmp_path)

        with pytest.raises(ActionError, match="No space left") as caught:
            evidence.collect(FakeWitness([]), "inc-1", "k", 5.0)

        assert caught.value.hint is not None
        assert list((mount / "incidents" / "inc-1").iterdir()) == []
    finally:
        subprocess.run(["umount", str(mount)], check=True)


# ── which shards the steps before an incident had their data from, in its bundle and its story ────


STEPS = range(90, 104)
NAMES = ("train_loss_raw", "batch_shard", "batch_offset", "batch_fingerprint")
BREACH = SimpleNamespace(id="inc-1", breach_step=100)


def batches(rank=0):
    """The newest batches as a probe writes them; one step in the middle has two shards."""
    tape = []
    for step in STEPS:
        shard = {"shard": f"web-{rank}-{step // 4}.tar", "offset": step % 4}
        tape.append({"step": step, "attempt": 0, "fingerprint": 7.0 * step, "shards": [shard]})
    tape[8]["shards"].append({"shard": "extra.tar", "offset": None})
    return tape


def window(*ranks):
    return [
        (NAMES, Frame(1000 + step, rank, 0, step, (2.5, step // 4, step % 4, 7.0 * step)))
        for rank in ranks
        for step in STEPS
    ]


def writing(tape):
    """Return a probe that writes this record of its newest batches, that of rank 0 only."""

    def write(directory, rank):
        if rank != 0:
            return "silence"
        answers(directory, rank)
        (directory / "rank-0-batches.json").write_text(json.dumps(tape))
        return None

    return write


def test_the_bundle_and_the_story_name_the_shards_of_the_five_steps_before_the_breach(bundle):
    """And of it, however many are kept: in a file, the audit log and `supervise why`."""
    job = FakeWitness([], {0: view(1)}, writing(batches()))
    seen, path = bundle(job, window=lambda: window(0), onset=lambda: BREACH)

    content = json.loads((path / "shards.json").read_text())
    assert [row["step"] for row in content["steps"]] == [95, 96, 97, 98, 99, 100]
    assert content["breach_step"] == 100 and content["shards"] == seen.shards
    assert list(seen.shards.items()) == [
        ("web-0-25.tar", "step 100"),
        ("web-0-24.tar", "steps 96 to 99"),
        ("extra.tar", "step 98"),
        ("web-0-23.tar", "step 95"),
    ]
    assert content["steps"][0] == {"rank": 0, **batches()[5]}
    assert "shards.json" in seen.files
    moment = {"record": 1, "step": 100, "attempt": 0, "wall": None, "outcome_record": 2}
    order = {"id": "a-1", "verb": "snapshot", "runbook": "hold", "args": NOTHING}
    end = {"touches_job": False, "is_undo": False, "outcome": "done", "ok": True, "took_s": 1.0}
    action = Action(result=Payload(msgspec.to_builtins(seen)), **moment, **order, **end)
    assert "shards=(web-0-25.tar=step 100, web-0-24.tar=steps 96 to 99" in outcome_text(action)


def test_a_rank_that_does_not_answer_is_known_from_its_frames(bundle):
    views = {0: view(1), 1: view(1, shards={"25": "web-1-25.tar"})}
    job = FakeWitness([], views, writing(batches()))
    seen, path = bundle(job, window=lambda: window(0, 1), onset=lambda: BREACH)

    rows = json.loads((path / "shards.json").read_text())["steps"]
    assert [row["rank"] for row in rows] == [0, 1] * 6
    assert seen.shards["web-1-25.tar"] == "step 100"
    assert seen.shards["shard number 24"] == "steps 96 to 99"
    shards = [{"shard": "web-1-25.tar", "offset": 0}]
    batch = {"rank": 1, "attempt": 0, "step": 100, "fingerprint": 700.0}
    assert rows[-1] == batch | {"shards": shards}


@pytest.mark.parametrize("tape", [None, "y", [1], [{"step": "a"}], [{"step": 1}]])
def test_a_tape_without_shards_names_none(bundle, tape):
    frames = [(("loss",), Frame(1, 0, 0, 1, (1.0,)))]
    seen, path = bundle(FakeWitness([], {0: view(1)}, writing(tape)), window=lambda: frames)
    assert not seen.shards and not (path / "shards.json").exists()
