"""The stability record: what it holds, what verification finds, and how two of them differ."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess

import pytest
from jsonschema import Draft7Validator

from supervise.cli import invoke
from supervise.core.model import Adopted, Announced, Frame, Gap, Notice
from supervise.report import stability_schema
from supervise.store import Audit, RunDir
from tests.support.recorded_run import SECOND, SMALL, WALL, make_frames, record_run

QUIET = [2.0 + 0.01 * (i % 5) for i in range(40)]
BUNDLE = "incidents/inc-1/snapshot-1"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run with a drill, an incident with a bundle, a gap and an adoption, and its record."""
    home = tmp_path_factory.mktemp("record")
    (home / "small.yaml").write_text(SMALL)
    bundle = home / "run" / BUNDLE
    drill = {"fault": "lr_spike", "params": {"factor": 30.0}, "steps": 20}

    def answer(action):
        bundle.mkdir(parents=True)
        (bundle / "metrics.csv").write_text("step\n")
        listed = {"name": "metrics.csv", "sha256": hashlib.sha256(b"step\n").hexdigest()}
        (bundle / "manifest.json").write_text(json.dumps({"files": [listed]}))
        made = hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()
        return {"path": BUNDLE, "sha256": made}

    events = [
        *make_frames(0, *QUIET),
        Notice(50 * SECOND, "drill", "drill <b>lr_spike</b> begins", 0, 40, drill),
        *make_frames(40, 8.0, 7.0, *[2.0] * 40),
        *make_frames(90, *[2.0] * 10),
        Gap(110 * SECOND, 0, 120, 3),
        Adopted(120 * SECOND, 99, True, 5 * SECOND),
    ]
    record_run(home / "run", events, policy=home / "small.yaml", answer=answer)
    assert invoke(["record", str(home / "run")]) == 0
    return home / "run"


def test_tokens_are_those_of_all_ranks_and_each_batch_counts_once(tmp_path, keep_run):
    names = ("train_loss_raw", "tokens_per_update", "batch_copies")
    events = [Announced(SECOND, rank, 4, 5 + rank, names) for rank in range(4)]
    events += [  # two batches, each on two ranks
        Frame((10 + step) * SECOND, rank, 0, step, (2.0, 100.0, 2.0))
        for step in range(5)
        for rank in range(4)
    ]
    run = keep_run(events)
    assert invoke(["record", str(run.path)]) == 0
    assert read(run)["run"]["tokens"] == 5 * 2 * 100


def test_a_launch_that_differs_from_the_one_before_has_the_published_form(keep_run):
    run = keep_run(make_frames(0, *QUIET), ended=False)
    log = Audit.open(run.audit_path, run.id, at_ns=SECOND, wall=WALL)
    first = {"run": run.id, "attempt": 0, "identity": {"inputs": {"seed": "1"}}}
    change = {"since": "attempt 0", "differs": [{"part": "code", "was": "1", "is": "2"}]}
    for data in (first, {**first, "attempt": 1, **change}):
        body, at = {"reason": "", "data": data}, {"at_ns": SECOND, "wall": WALL, "step": 9}
        log.append("identity", actor="supervisor", body=body, sync=False, **at)
    log.close()

    assert invoke(["record", str(run.path)]) == 0
    assert read(run)["identity"]["changes"] == [{"attempt": 1, "step": 9, **change}]
    assert list(Draft7Validator(stability_schema()).iter_errors(read(run))) == []
    assert invoke(["record", "verify", str(run.path)]) == 0


def test_the_page_of_a_live_run_is_not_red_and_marks_its_newest_incident(keep_run, supervise):
    run = keep_run(make_frames(0, *QUIET * 15, *[2.0] * 5, 8.0), ended=False)

    page = supervise("record", "--format", "html", run.path)[1]

    loss = json.loads(supervise("record", "--format", "json", run.path)[1])["loss"]
    assert loss["steps"][-1] < 605  # the incident is behind the first of 8 steps of that point
    assert "1 incident, 1 not closed" in page
    assert page.count('<line class="opened"') == 1 and '<span class="state busy">' in page


@pytest.fixture
def run(kept, tmp_path):
    """A copy of that run, to be damaged."""
    return RunDir.open(shutil.copytree(kept, tmp_path / "run"))


def read(run):
    return json.loads((run.path / "record" / "record.json").read_text())


@pytest.fixture
def verified(supervise):
    """A function that verifies a record; returns the exit code and `{part: (status, text)}`."""

    def verify(target, *options):
        code, out, _ = supervise("record", "verify", "--json", *options, target)
        return code, {p["part"]: (p["status"], p["text"]) for p in json.loads(out)["parts"]}

    return verify


def test_it_has_the_published_form_and_the_numbers_of_the_run(run, verified, supervise):
    record = read(run)

    assert list(Draft7Validator(stability_schema()).iter_errors(record)) == []
    assert record["run"]["steps_made"] == 100 and record["run"]["exit_code"] == 0
    assert "unknown" in record["identity"]["first"]  # with the reason
    (drill,) = record["fault_injection"]["in_this_run"]
    assert (drill["fault"], drill["rule"], drill["reported_after"]) == ("lr_spike", "spike", 0)
    rule = next(one for one in record["rules"] if one["rule"] == "spike")
    assert rule["thresholds"]["high"].startswith("threshold, metric: train_loss_raw, gt: 5.0")
    assert rule["threshold_source"] == "set by the policy of this run (policy.yaml)"
    lead = {"fault": "lr_spike", "step": 40, "reported_after": 0}
    assert rule["lead_time"] == {"in_this_run": [lead]}
    states = {one["rule"]: one["state"] for one in record["rules"]}
    assert states["blind"] == "inactive: the job has no my_score"
    loss = next(one for one in record["monitors"] if one["signal"] == "train_loss_raw")
    assert (loss["healthy_baseline"]["median"], loss["present_in"]) == (2.0, 1.0)
    assert loss["healthy_baseline"]["p95"] < 2.1  # not of the incident
    assert record["interventions"]["by_name"] == {"lr_scale": {"done": 1}}
    (calm,) = record["recovery"]
    assert (calm["used"], calm["verified"], calm["failed"]) == (1, 1, 0)
    gaps = {"inactive_rules": ["blind"], "unwatched_s": [5.0], "frames_lost": 3}
    gaps |= {"steps_without_frame": 8, "blind_share": 0.08}
    assert record["gaps"] | gaps == record["gaps"]
    again = supervise("record", "--format", "json", run.path)[1]
    assert again == (run.path / "record" / "record.json").read_text()
    page = supervise("record", "--format", "html", run.path)[1]
    assert not re.search(r"<(script|link|img|b)\b| style=", page) and "lr_spike" in page
    chapters = re.findall(r'<a href="#(\w+)">', page)
    assert len(chapters) == 8 and all(f'<section id="{name}">' in page for name in chapters)
    assert "1 incident, all closed; 1 action on the job" in page and "<polyline" in page
    assert record["loss"]["metric"] == "train_loss_raw" and max(record["loss"]["highest"]) > 3.0


def test_an_unchanged_run_and_its_record_are_good(run, verified, tmp_path):
    code, parts = verified(run.path)
    statuses = {part: status for part, (status, _) in parts.items()}
    assert (code, statuses.pop("signature")) == (0, "unchecked")
    good = ("audit", "policy", "evidence", "journal", "record")
    assert statuses == dict.fromkeys(good, "good")
    copied = shutil.copy(run.path / "record" / "record.json", tmp_path / "copy.json")
    assert verified(copied)[1]["record"][0] == "unchecked"
    assert verified(copied, "--run", run.path)[1]["record"][0] == "good"


@pytest.mark.parametrize(
    ("pattern", "old", "new", "part", "said"),
    [
        ("policy.yaml", b"gt: 5", b"gt: 6", "policy", "policy.yaml was changed"),
        (f"{BUNDLE}/*.csv", b"step", b"stop", "evidence", f"{BUNDLE}/metrics.csv was changed"),
        ("audit.log", b"spike", b"spoke", "audit", "audit record "),
        ("journal/*", b"lr_spike", b"lr_spoke", "journal", ""),
        ("record/*.md", b"lr\\_scale", b"lr\\_x", "record", "record.md is not what record.json"),
        ("record/*.json", b'"paused_s"', b'"paused_h"', "record", "it has not the published form"),
    ],
)
def test_what_was_changed_is_named(run, supervise, pattern, old, new, part, said):
    path = min(run.path.glob(pattern))
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new, 1))

    code, out, _ = supervise("record", "verify", run.path)

    assert code == 1
    assert re.search(f"^{part}: changed: .*{re.escape(said)}", out, re.M), out


def test_a_log_that_was_cut_and_a_forged_record_are_named(run, supervise):
    """Whoever forges one of its files can write the others again from it."""
    lines = run.audit_path.read_bytes().splitlines(keepends=True)
    run.audit_path.write_bytes(b"".join(lines[:-1]))
    cut = supervise("record", "verify", run.path)
    run.audit_path.write_bytes(b"".join(lines))
    forge(run)
    forged = supervise("record", "verify", run.path)

    assert cut[0] == forged[0] == 1
    assert re.search("^audit: changed: .*records were removed", cut[1], re.M), cut[1]
    differ = "fields that differ from the run: incidents[inc-1].headline, cost.steps"
    assert differ in forged[1] and " loss" in forged[1].partition(differ)[2].splitlines()[0]


def forge(run):
    record = read(run)
    record["cost"]["steps"] += 1
    record["incidents"][0]["headline"] = "nothing of note"
    del record["loss"]
    (run.path / "record" / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    for name in ("record.md", "record.html"):
        (run.path / "record" / name).unlink()


def test_a_signature_is_of_the_bytes_and_of_the_key(run, verified, supervise, tmp_path):
    def openssl(*argv):
        return subprocess.run(["openssl", *argv], capture_output=True, cwd=tmp_path, check=False)

    for name in ("key", "other"):
        openssl("genpkey", "-algorithm", "ed25519", "-out", f"{name}.pem")
        openssl("pkey", "-in", f"{name}.pem", "-pubout", "-out", f"{name}-public.pem")
    assert verified(run.path, "--key", tmp_path / "key-public.pem")[1]["signature"][0] == "missing"

    code, out, _ = supervise("record", "--json", "--key", tmp_path / "key.pem", run.path)
    made = json.loads(out)
    assert (code, made["signed"], made["files"][0]) == (0, True, "record.json")
    assert made["head"] == read(run)["audit"]["head"]

    code, parts = verified(run.path, "--key", tmp_path / "key-public.pem")
    assert (code, parts["signature"][0]) == (0, "good")
    record = run.path / "record" / "record.json"
    options = ("-pubin", "-inkey", "key-public.pem", "-rawin", "-in", str(record))
    assert openssl("pkeyutl", "-verify", *options, "-sigfile", f"{record}.sig").returncode == 0
    wrong = verified(run.path, "--key", tmp_path / "other-public.pem")
    assert (wrong[0], wrong[1]["signature"][0]) == (1, "changed")
    forge(run)
    assert verified(run.path, "--key", tmp_path / "key-public.pem")[1]["signature"][0] == "changed"
    code, _, err = supervise("record", "--key", run.policy_path, run.path)
    assert code == 64 and "openssl genpkey" in err


def test_two_records_are_compared_by_field(run, supervise, tmp_path):
    assert supervise("record", "diff", run.path, run.path)[:2] == (0, "")
    record = read(run)
    record["rules"].pop(0)
    record["cost"]["steps"] = 7
    (tmp_path / "other.json").write_text(json.dumps(record))

    code, out, _ = supervise("record", "diff", run.path, tmp_path / "other.json")

    assert code == 1
    lines = out.splitlines()
    assert "cost.steps: 0 → 7" in lines
    assert all(line.startswith(("cost.steps", "rules[spike].")) for line in lines)
