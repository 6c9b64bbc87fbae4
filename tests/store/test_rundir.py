from pathlib import Path

import pytest

from supervise.errors import StoreError
from supervise.store import RunDir, create_file, make_directory

WALL = "2026-01-05T10:11:12.345Z"


def test_a_run_has_a_place_of_its_own(tmp_path, policy, monkeypatch):
    """Without a path it is ./runs/<utc>-<id>, and the id is the directory's name."""
    monkeypatch.chdir(tmp_path)

    run = RunDir.create(None, argv=["python", "a b.py"], policy=policy, wall=WALL)

    assert run.path == tmp_path / "runs" / run.id
    assert run.id.startswith("20260105-101112-")
    described = run.read_json("run.json")
    assert (described["run"], described["argv"]) == (run.id, ["python", "a b.py"])
    assert described["policy_digest"] == "sha256:0"
    assert (run.path / "policy.yaml").read_text() == policy.resolved
    assert RunDir.open(run.path).id == run.id


def test_a_place_that_is_taken_or_cannot_be_written_is_refused(tmp_path, policy):
    (tmp_path / "file").write_text("mine")

    for place, cause in (
        (tmp_path, "is not empty"),
        (tmp_path / "file", "cannot create the run directory"),
        (Path("/proc/run"), "cannot create the run directory"),
    ):
        with pytest.raises(StoreError, match=cause) as caught:
            RunDir.create(place, argv=[], policy=policy, wall=WALL)
        assert caught.value.exit_code == 64
        assert caught.value.hint is not None and "--run-dir" in caught.value.hint
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_directory_that_is_no_run_is_refused_with_a_way_out(tmp_path, run):
    with pytest.raises(StoreError, match=r"is not a run") as caught:
        RunDir.open(tmp_path)
    assert caught.value.hint == f"did you mean {run.path}?"

    with pytest.raises(StoreError, match="is not a directory"):
        RunDir.open(tmp_path / "nowhere")
    (run.path / "run.json").write_text("[]")
    with pytest.raises(StoreError, match="does not describe a run"):
        RunDir.open(run.path)


@pytest.mark.parametrize("run_id", ["../..", "/tmp/x", ".", "..", "", "r\n", "x" * 101, 7])
def test_the_id_of_a_run_names_no_directory_elsewhere(run, run_id):
    """Another may have written run.json, and the cache and the notes of a run are named by it."""
    assert RunDir.open(run.path).id == run.id
    run.write_json("run.json", {**run.read_json("run.json"), "run": run_id})

    with pytest.raises(StoreError, match="does not describe a run"):
        RunDir.open(run.path)


def test_json_is_replaced_whole(run):
    run.write_json("state.json", {"loss": float("nan")})
    run.write_json("state.json", {"loss": float("-inf"), "names": ("a", "b")}, durable=True)

    assert run.read_json("state.json") == {"loss": "-Inf", "names": ["a", "b"]}
    assert not list(run.path.glob(".*"))
    with pytest.raises(StoreError, match="cannot read"):
        run.read_json("none.json")
    with pytest.raises(StoreError, match="cannot write"):
        run.write_json("none/x.json", {})
    (run.path / "bad.json").write_text("{")
    with pytest.raises(StoreError, match="is not JSON"):
        run.read_json("bad.json")


@pytest.mark.parametrize("by", ["directory", "link"])
def test_nothing_is_written_into_a_directory_put_in_place_of_the_run(tmp_path, policy, by):
    """Nor removed from it: another user may have moved ours away, to have us write to a third."""
    run = RunDir.create(tmp_path / "run", argv=["x"], policy=policy, wall=WALL)
    run.path.rename(tmp_path / "moved")
    other = run.path if by == "directory" else tmp_path / "home"
    (other / "incidents").mkdir(parents=True)
    (other / "state.json").write_text("theirs")
    if by == "link":
        run.path.symlink_to(other)

    with pytest.raises(StoreError, match="moved or replaced"):
        run.write_json("state.json", {})
    for write in (make_directory, create_file):
        with pytest.raises(OSError, match="moved or replaced"):
            write(run.incidents_path / "inc-1")
    run.discard()

    assert (other / "state.json").read_text() == "theirs"
    assert {path.name for path in other.rglob("*")} == {"incidents", "state.json"}


def test_a_shared_run_holds_no_secret(tmp_path, policy):
    """`chmod -R g+rX RUN` does not reach what a later supervisor needs, and the end removes it."""
    argv = ["train", "--token", "s3cr3tValue"]
    run = RunDir.create(tmp_path / "run", argv=argv, policy=policy, wall=WALL)
    run.write_secret("environ.json", {"HF_TOKEN": "s3cr3tValue"})

    inside = [path for path in run.path.rglob("*") if path.is_file()]
    assert [path for path in inside if b"s3cr3tValue" in path.read_bytes()] == []
    assert run.secrets_path.stat().st_mode & 0o777 == 0o700
    assert RunDir.open(run.path).command() == argv
    run.remove_secrets()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_secrets_lie_in_the_run_where_nothing_can_lie_beside_it(tmp_path, policy):
    (tmp_path / ".run.secrets").write_text("in the way")
    run = RunDir.create(tmp_path / "run", argv=["train"], policy=policy, wall=WALL)

    assert run.secrets_path == run.path / "secrets"
    assert RunDir.open(run.path).command() == ["train"]
