"""Finding checkpoints, and deciding when one is complete, by names and sizes only."""

from __future__ import annotations

import json

import pytest

from supervise.checkpoints import (
    FileIdentity,
    explain_unusable,
    find_checkpoint_root,
    find_current_path,
    find_matches,
    find_missing_files,
    has_optimizer_alongside,
    stamp_files,
)


@pytest.fixture
def make(tmp_path):
    """Return a function: create a directory with these files, and return what it lacks."""

    def make(*names, ranks=1, index=None):
        folder = tmp_path / "checkpoint-10"
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"x")
        if index is not None:
            text = json.dumps({"weight_map": dict(enumerate(index))})
            (folder / "model.safetensors.index.json").write_text(text)
        return find_missing_files(str(folder), stamp_files(str(folder)), ranks)

    return make


def test_complete_directory(make):
    """Two shards with their index, and random states of both ranks."""
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

    assert make(*shards, "rng_state_0.pth", "rng_state_1.pth", ranks=2, index=shards) == ""


def test_single_rank_needs_no_numbered_files(make):
    assert make("rng_state.pth", "model.bin") == ""


@pytest.mark.parametrize(
    ("names", "index", "lacks"),
    [
        (["pytorch_model-00001-of-00002.bin"], None, "pytorch_model-00002-of-00002.bin is missing"),
        (["a.safetensors"], ["a.safetensors", "b.safetensors"], "b.safetensors is missing"),
        (["sub/__0_0.distcp"], None, "sub/.metadata is missing"),
        (["sub/__0_0.distcp", "sub/.metadata"], None, ""),
        (["rng_state_0.pth", "x.bin"], None, "rng_state_1.pth is missing"),
        (["model.bin", "optimizer.bin.tmp"], None, "optimizer.bin.tmp is still being written"),
    ],
)
def test_incomplete_directory(make, names, index, lacks):
    """A shard is missing by number or index, a rank's file, or the file written last."""
    assert make(*names, ranks=2, index=index) == lacks


def test_patterns_skip_links_and_partial_files(tmp_path):
    """`latest.pt` is a link to another checkpoint; `.partial` is incomplete."""
    for name in ("b.pt", "a.pt", "c.pt.partial"):
        (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "out" / name).write_bytes(b"x")
    (tmp_path / "out" / "latest.pt").symlink_to("a.pt")

    found = find_matches(["out/*.pt*", str(tmp_path / "out" / "b.*")], tmp_path)

    assert sorted(found) == [str(tmp_path / "out" / "a.pt"), str(tmp_path / "out" / "b.pt")]


def test_shard_belongs_to_its_directory(tmp_path):
    """By its name, or because a pattern names the directory."""
    folder = tmp_path / "checkpoint-10"

    assert find_checkpoint_root(f"{folder}/m-00001-of-00002.bin", []) == str(folder)
    assert find_checkpoint_root(f"{folder}/sub/model.pt", [str(folder)]) == str(folder)
    assert find_checkpoint_root(f"{folder}/model.pt", []) == f"{folder}/model.pt"


def test_a_renamed_file_is_followed(tmp_path):
    """By device, inode, size and mtime, of whatever clock, within its directory."""
    old, new = tmp_path / "a.partial", tmp_path / "a.pt"
    old.write_bytes(b"x")
    found = old.stat()
    stat = (found.st_size, found.st_mtime_ns, found.st_ino)
    identity = FileIdentity(found.st_dev, stat, 0.0, 0.0)  # clock of a file server
    assert find_current_path(str(old), identity) == str(old)
    old.rename(new)
    old.write_bytes(b"another one")

    assert find_current_path(str(old), identity) == str(new)
    assert find_current_path(str(old), None) is None
    assert find_current_path(str(tmp_path / "no" / "a"), identity) is None


def test_inode_is_not_enough(tmp_path):
    """Another file may reuse it; size and mtime of the report or of a scan must match too."""
    path, folder = tmp_path / "best.pt", tmp_path / "dir"
    folder.mkdir()
    (folder / "weights").write_bytes(b"x")
    path.write_bytes(b"x")
    for place in (path, folder):
        found = place.stat()
        early_ns = found.st_mtime_ns - 600_000_000
        identity = FileIdentity(found.st_dev, (1, early_ns, found.st_ino), early_ns, early_ns)

        assert find_current_path(str(tmp_path / "a.pt"), identity) is None
        seen = stamp_files(str(place))
        assert find_current_path(str(tmp_path / "a.pt"), identity, seen) == str(place)
        seen = tuple((name, size + 1, at, node) for name, size, at, node in seen)
        assert find_current_path(str(tmp_path / "a.pt"), identity, seen) is None


def test_the_files_of_one_step_are_one_checkpoint(tmp_path):
    """As nanochat writes them: the model stands for its set, which needs what the last one had."""

    def save(*names):
        for name in names:
            (tmp_path / name).write_bytes(b"x")

    def at(name):
        return str(tmp_path / name)

    def lacks(name):
        return find_missing_files(at(name), stamp_files(at(name)), 1)

    save("model_00100.pt", "meta_00100.json", "optim_00100_rank0.pt", "optim_00100_rank1.pt")
    save("model_00200.pt", "meta_00200.json", "optim_00200_rank0.pt", "notes_00200.txt")
    for name in ("meta_00100.json", "optim_00100_rank1.pt", "model_00100.pt"):
        assert find_checkpoint_root(at(name), []) == at("model_00100.pt")
    assert find_checkpoint_root(at("notes_00200.txt"), []) == at("notes_00200.txt")
    assert lacks("model_00100.pt") == ""
    assert lacks("model_00200.pt") == "optim_00200_rank1.pt is missing"
    assert has_optimizer_alongside(at("model_00200.pt"))
    save("model_00300.pt")
    assert not has_optimizer_alongside(at("model_00300.pt"))

    patterns = ["optim_*.pt"]  # which leave the model out
    found = find_matches(patterns, tmp_path)
    assert find_checkpoint_root(found[0], found) == found[0]
    why = "it is a part of model_00200.pt, which is not matched"
    assert explain_unusable(patterns, tmp_path) == f"optim_00200_rank0.pt: {why}"
    assert explain_unusable(["model_*.pt"], tmp_path) == ""
    assert explain_unusable(["model_00200.*"], tmp_path).endswith("rank1.pt is missing")
    assert explain_unusable(["*.ckpt"], tmp_path) == "nothing matches *.ckpt"
