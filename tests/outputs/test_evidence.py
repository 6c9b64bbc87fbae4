"""The evidence bundle."""

import csv
import hashlib
import json
import math
import shutil
import subprocess

import pytest

from supervise.core.model import Frame
from supervise.errors import ActionError
from supervise.runtime import Evidence, metrics_csv

NAMES = ("train_loss_raw", "loss_scale")
WINDOW = [
    (NAMES, Frame(1000, 0, 0, 7, (2.5, None))),
    (("train_loss_raw", "update_norm"), Frame(2000, 0, 0, 8, (math.nan, 0.1))),
]
FILES = ("stacks.txt", "rng.json", "batches.json")


def answers(directory, rank):
    for name in FILES:
        (directory / f"rank-{rank}-{name}").write_text(f"{rank} {name}\n")


@pytest.fixture
def run(tmp_path):
    """A run directory, and an Evidence over it."""
    marks = tmp_path / "run" / "probe"
    marks.mkdir(parents=True)
    incidents = tmp_path / "run" / "incidents"
    evidence = Evidence(incidents, marks, lambda: WINDOW, directory=tmp_path)
    return tmp_path / "run", evidence


def manifest(run, seen):
    return json.loads((run / seen.path / "manifest.json").read_text())


def test_the_manifest_accounts_for_every_file(run, witness, hung, view):
    path, evidence = run
    job = witness([hung().pid], {0: view(1)}, answers)

    seen = evidence.collect(job, "inc-1", "k1", 30.0)

    bundle = path / seen.path
    assert seen.path == "incidents/inc-1/snapshot-1"
    assert seen.sha256 == hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()
    listed = {entry["name"]: entry for entry in manifest(path, seen)["files"]}
    assert set(listed) | {"manifest.json"} == {entry.name for entry in bundle.iterdir()}
    assert set(listed) == set(seen.files) >= {f"rank-0-{name}" for name in FILES}
    for name, entry in listed.items():
        data = (bundle / name).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert seen.bytes == sum(entry.stat().st_size for entry in bundle.iterdir())
    assert list((path / "incidents" / "inc-1").iterdir()) == [bundle]


def test_the_metric_window_keeps_absent_and_nan_apart(run, witness, hung, view):
    path, evidence = run

    seen = evidence.collect(witness([hung().pid], {0: view(1)}, answers), "inc-1", "k", 30.0)

    with (path / seen.path / "metrics.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["step", "rank", "attempt", "at_ns", "train_loss_raw", "loss_scale", "update_norm"],
        ["7", "0", "0", "1000", "2.5", "", ""],
        ["8", "0", "0", "2000", "nan", "", "0.1"],
    ]


def test_secrets_are_replaced_and_named(run, witness, hung, view, tmp_path):
    path, _ = run
    log = tmp_path / "train.log"
    log.write_text("login with verysecretvalue ok\n")
    evidence = Evidence(path / "incidents", path / "probe", list, directory=tmp_path, logs=[log])
    job = hung(MY_TOKEN="verysecretvalue", PLAIN="seen")

    seen = evidence.collect(witness([job.pid], {0: view(1)}, answers), "inc-1", "k", 30.0)

    bundle = path / seen.path
    assert "MY_TOKEN" in manifest(path, seen)["redacted"]
    environment = json.loads((bundle / "environment.json").read_text())
    assert (environment["MY_TOKEN"], environment["PLAIN"]) == ("<redacted>", "seen")
    assert next(bundle.glob("log-*-train.log")).read_text() == "login with <redacted> ok\n"
    assert not any(b"verysecretvalue" in file.read_bytes() for file in bundle.iterdir())


def test_a_hung_job_still_gives_a_bundle_with_its_stacks(run, witness, hung, view):
    """The probe does not answer, so its signal handler is used, and the rest is said missing."""
    path, evidence = run
    job = hung(path / "probe")

    seen = evidence.collect(witness([job.pid], {0: view(job.pid, silent_s=99)}), "inc-1", "k", 30.0)

    assert seen.standstill.startswith("rank 0 waits at <string>:")
    assert seen.standstill.endswith(", after step 8")
    text = (path / seen.path / f"stacks-{job.pid}.txt").read_text()
    assert text.count("in stuck_in_here") == 2
    assert [gap["what"] for gap in manifest(path, seen)["missing"]] == [
        "stacks, random state and batch fingerprints from the probe of rank 0"
    ]


@pytest.mark.skipif(shutil.which("py-spy") is not None, reason="py-spy is installed here")
def test_without_any_way_in_the_kernels_view_remains(run, witness, hung):
    path, evidence = run
    job = hung()

    seen = evidence.collect(witness([job.pid]), "inc-1", "k", 30.0)

    assert "thread" in (path / seen.path / "kernel.txt").read_text()
    assert manifest(path, seen)["missing"] == [
        {
            "what": f"Python stacks of process {job.pid}",
            "why": "the probe registered no handler for it; py-spy is not installed",
        }
    ]


def test_a_half_written_answer_is_not_evidence(run, witness, hung, view):
    path, evidence = run

    def fails(directory, rank):
        (directory / f"rank-{rank}-rng.json").write_text('{"half')
        return "no space left"

    seen = evidence.collect(witness([hung().pid], {0: view(1)}, fails), "inc-1", "k", 30.0)

    assert "rank-0-rng.json" not in seen.files
    assert {"no space left"} <= {gap["why"] for gap in manifest(path, seen)["missing"]}


def test_the_same_key_gives_the_same_bundle(run, witness, hung, view):
    _, evidence = run
    job = witness([hung().pid], {0: view(1)}, answers)

    first = evidence.collect(job, "inc-1", "k1", 30.0)
    again = evidence.collect(job, "inc-1", "k1", 30.0)
    other = evidence.collect(job, "inc-1", "k2", 30.0)

    assert again == first
    assert len(job.asked) == 2
    assert other.path == "incidents/inc-1/snapshot-2"


def test_a_dead_job_and_a_stuck_loop_cost_only_what_they_would_have_given(run, witness):
    _, evidence = run

    seen = evidence.collect(witness([], loop=False), "inc-1", "k", 5.0)

    assert {"host.json", "git.json", "environment.json", "metrics.csv"} <= set(seen.files)
    assert {"ranks", "metrics"} <= set(seen.missing)


def test_an_incident_name_cannot_lead_out_of_the_run_directory(run, witness):
    path, evidence = run

    seen = evidence.collect(witness([]), "../../x y", "k", 5.0)

    assert (path / seen.path / "manifest.json").exists()


def test_a_full_disk_fails_the_bundle_and_leaves_nothing(witness, tmp_path):
    mount = tmp_path / "full"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        (mount / "filler").write_bytes(b"x" * 48 * 1024)
        window = [(("loss",), Frame(n, 0, 0, n, (float(n),))) for n in range(2000)]
        evidence = Evidence(mount / "incidents", mount, lambda: window, directory=tmp_path)

        with pytest.raises(ActionError, match="No space left") as caught:
            evidence.collect(witness([]), "inc-1", "k", 5.0)

        assert caught.value.hint is not None
        assert list((mount / "incidents" / "inc-1").iterdir()) == []
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_no_column_is_a_formula():
    """The job may call a metric what it likes; a spreadsheet would run it."""
    text = metrics_csv(
        [(("=cmd|'/C calc'!A0", "-loss", "loss"), Frame(1, 0, 0, 5, (-1.0, 2.0, 3.0)))]
    )

    assert text == "step,rank,attempt,at_ns,'=cmd|'/C calc'!A0,'-loss,loss\n5,0,0,1,-1.0,2.0,3.0\n"
