"""Finding checkpoints, and deciding when one is complete, by names and sizes only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from supervise.checkpoints import (
    FileIdentity,
    Register,
    explain_unusable,
    find_current_path,
    find_matches,
    stamp_files,
)


@pytest.mark.parametrize(
    ("names", "index", "lacks"),
    [
        # two shards with their index, and the random states of a rank
        (["m-00001-of-00002.bin", "m-00002-of-00002.bin", "rng_state.pth"], None, ""),
        (["a.safetensors", "b.safetensors"], ["a.safetensors", "b.safetensors"], ""),
        (["rng_state.pth", "model.bin"], None, ""),
        (["sub/__0_0.distcp", "sub/.metadata"], None, ""),
        (["pytorch_model-00001-of-00002.bin"], None, "pytorch_model-00002-of-00002.bin is missing"),
        (["a.safetensors"], ["a.safetensors", "b.safetensors"], "b.safetensors is missing"),
        (["sub/__0_0.distcp"], None, "sub/.metadata is missing"),
        (["model.bin", "optimizer.bin.tmp"], None, "optimizer.bin.tmp is still being written"),
    ],
)
def test_directory_needs_what_its_names_promise(tmp_path, names, index, lacks):
    folder = tmp_path / "checkpoint-10"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    if index is not None:
        text = json.dumps({"weight_map": dict(enumerate(index))})
        (folder / "model.safetensors.index.json").write_text(text)

    said = explain_unusable(["checkpoint-*"], tmp_path)

    assert said == (lacks and f"checkpoint-10: {lacks}")


def test_a_directory_needs_the_files_of_all_ranks(driver):
    folder = driver.out / "checkpoint-10"
    driver.write("checkpoint-10/model.bin", "good 1")
    driver.write("checkpoint-10/rng_state_0.pth", "good 1")
    driver.report(folder, 9, ranks=2)
    assert driver.run_once() == []

    driver.write("checkpoint-10/rng_state_1.pth", "good 1")
    assert driver.run_once() == [("ckpt-1", 9, True)]


def test_files_without_a_step_are_of_one_save_where_they_are_seen_together(driver):
    """Before the first frame nobody knows the step: the damaged file of the newest save counts."""
    driver.open(glob=("*.pt",))
    driver.write("model.pt", "torn")
    driver.save("optim.pt", "good 1")
    assert Register(driver.run).newest().id == "ckpt-1"

    driver.save("later.pt", "good 2")
    assert Register(driver.run).newest().id == "ckpt-3"
    assert [event.data["save"] for event in driver.events] == [1, 1, 3]


def test_a_file_that_follows_while_the_one_before_is_written_is_of_its_save(driver):
    driver.open(glob=("*.pt", "*/*.pt"), settle=60.0)
    for name in ("model.pt", "optim.pt", "other/model.pt"):
        driver.write(name, "good 1")
        driver.guard.scan()

    assert [entry["save"] for entry in driver.entries()] == [1, 1, 3]


def test_patterns_skip_links_and_partial_files(tmp_path):
    for name in ("b.pt", "a.pt", "c.pt.partial"):
        (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "out" / name).write_bytes(b"x")
    (tmp_path / "out" / "latest.pt").symlink_to("a.pt")

    found = find_matches(["out/*.pt*", str(tmp_path / "out" / "b.*")], tmp_path)

    assert sorted(found) == [str(tmp_path / "out" / "a.pt"), str(tmp_path / "out" / "b.pt")]


@pytest.mark.slow
def test_shard_belongs_to_its_directory(driver):
    driver.open(glob=("named",))
    driver.write("shards/m-00001-of-00001.bin", "good 1", step=9)
    driver.write("named/model.pt", "good 1", step=19)
    driver.write("alone/model.pt", "good 1", step=29)

    driver.run_once()

    found = sorted(Path(e["path"]).name for e in driver.entries())
    assert found == ["model.pt", "named", "shards"]


def test_a_renamed_file_is_followed_by_its_inode_size_and_mtime(tmp_path):
    """Another file may reuse the inode; those of the report or of a scan must match too."""
    path, folder, old = tmp_path / "best.pt", tmp_path / "dir", str(tmp_path / "a.pt")
    folder.mkdir()
    (folder / "weights").write_bytes(b"x")
    path.write_bytes(b"x")
    for place in (path, folder):
        stat = place.stat()
        early_ns = stat.st_mtime_ns - 600_000_000
        identity = FileIdentity(stat.st_dev, (1, early_ns, stat.st_ino), early_ns, early_ns)

        assert find_current_path(old, identity) is None
        stamp = stamp_files(str(place))
        assert find_current_path(old, identity, stamp) == str(place)
        assert find_current_path(old, None, stamp) is None
        assert find_current_path(str(tmp_path / "no" / "a"), identity, stamp) is None
        other = tuple((name, size + 1, at, node) for name, size, at, node in stamp)
        assert find_current_path(old, identity, other) is None
    stat = path.stat()
    server = FileIdentity(stat.st_dev, (1, stat.st_mtime_ns, stat.st_ino), 0.0, 0.0)  # its clock
    assert find_current_path(old, server) == find_current_path(str(path), server) == str(path)


def test_the_files_of_one_step_are_one_checkpoint(tmp_path):
    """As nanochat writes them: the model stands for its set, which needs what the last one had."""
    names = ["model_00100.pt", "meta_00100.json", "optim_00100_rank0.pt", "optim_00100_rank1.pt"]
    names += ["model_00200.pt", "meta_00200.json", "optim_00200_rank0.pt", "notes_00200.txt"]
    for name in names:
        (tmp_path / name).write_bytes(b"x")

    why = "it is a part of model_00200.pt, which is not matched"
    assert explain_unusable(["optim_*.pt"], tmp_path) == f"optim_00200_rank0.pt: {why}"
    assert explain_unusable(["model_*.pt"], tmp_path) == ""
    assert explain_unusable(["notes_*"], tmp_path) == ""
    lacks = "model_00200.pt: optim_00200_rank1.pt is missing"
    assert explain_unusable(["model_00200.*"], tmp_path) == lacks
    assert explain_unusable(["*.ckpt"], tmp_path) == "nothing matches *.ckpt"
