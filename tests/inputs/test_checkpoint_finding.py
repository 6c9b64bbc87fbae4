"""Where checkpoints are, and when all of one is there. Names and sizes only: any bytes do."""

from __future__ import annotations

import json

import pytest

from supervise.checkpoints import discovery


@pytest.fixture
def make(tmp_path):
    """A function that makes a directory with these files and returns what is missing in it."""

    def make(*names, ranks=1, index=None):
        folder = tmp_path / "checkpoint-10"
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"x")
        if index is not None:
            text = json.dumps({"weight_map": dict(enumerate(index))})
            (folder / "model.safetensors.index.json").write_text(text)
        return discovery.missing(str(folder), discovery.stamp(str(folder)), ranks)

    return make


def test_a_directory_that_is_whole(make):
    """Two shards beside their index, random states of both ranks."""
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

    assert make(*shards, "rng_state_0.pth", "rng_state_1.pth", ranks=2, index=shards) == ""


@pytest.mark.parametrize(
    ("names", "index", "lacks"),
    [
        (["pytorch_model-00001-of-00002.bin"], None, "pytorch_model-00002-of-00002.bin is missing"),
        (["a.safetensors"], ["a.safetensors", "b.safetensors"], "b.safetensors is missing"),
        (["sub/__0_0.distcp"], None, ".metadata is missing"),
        (["rng_state_0.pth", "x.bin"], None, "rng_state_1.pth is missing"),
        (["model.bin", "optimizer.bin.tmp"], None, "optimizer.bin.tmp is still being written"),
    ],
)
def test_what_a_directory_lacks(make, names, index, lacks):
    """A shard by its number, by the index, of a rank; the file that is written last."""
    assert make(*names, ranks=2, index=index) == lacks


def test_a_rank_of_one_needs_no_number(make):
    """What a run on more ranks left is not asked for."""
    assert make("rng_state.pth", "model.bin") == ""


def test_an_empty_file(tmp_path):
    """It exists, and that is all."""
    path = tmp_path / "a.pt"
    path.touch()

    assert discovery.missing(str(path), discovery.stamp(str(path)), 1) == "it is empty"


def test_patterns_leave_out_links_and_what_is_being_written(tmp_path):
    """`latest.pt` points to another one; `.partial` is none yet."""
    for name in ("b.pt", "a.pt", "c.pt.partial"):
        (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "out" / name).write_bytes(b"x")
    (tmp_path / "out" / "latest.pt").symlink_to("a.pt")

    found = discovery.matches(["out/*.pt*", str(tmp_path / "out" / "b.*")], tmp_path)

    assert sorted(found) == [str(tmp_path / "out" / "a.pt"), str(tmp_path / "out" / "b.pt")]


def test_a_shard_stands_for_its_directory(tmp_path):
    """By its name, or because a pattern names the directory."""
    folder = tmp_path / "checkpoint-10"

    assert discovery.whole(f"{folder}/m-00001-of-00002.bin", []) == str(folder)
    assert discovery.whole(f"{folder}/sub/model.pt", [str(folder)]) == str(folder)
    assert discovery.whole(f"{folder}/model.pt", []) == f"{folder}/model.pt"


def test_a_renamed_file_is_followed(tmp_path):
    """By device, inode, size and time of writing, whatever clock that is by, in its directory."""
    old, new = tmp_path / "a.partial", tmp_path / "a.pt"
    old.write_bytes(b"x")
    found = old.stat()
    look = (found.st_size, found.st_mtime_ns, found.st_ino)
    mark = discovery.FileIdentity(
        found.st_dev, look, 0.0, 0.0
    )  # written by the clock of a file server
    assert discovery.named(str(old), mark) == str(old)
    old.rename(new)
    old.write_bytes(b"another one")

    assert discovery.named(str(old), mark) == str(new)
    assert discovery.named(str(old), None) is None
    assert discovery.named(str(tmp_path / "no" / "a"), mark) is None


def test_an_inode_is_not_enough(tmp_path):
    """Another file may have it by now; what was told or seen is known by its size and time."""
    path, folder = tmp_path / "best.pt", tmp_path / "dir"
    folder.mkdir()
    (folder / "weights").write_bytes(b"x")
    path.write_bytes(b"x")
    for place in (path, folder):
        found = place.stat()
        early_ns = found.st_mtime_ns - 600_000_000
        mark = discovery.FileIdentity(found.st_dev, (1, early_ns, found.st_ino), early_ns, early_ns)

        assert discovery.named(str(tmp_path / "a.pt"), mark) is None
        seen = discovery.stamp(str(place))
        assert discovery.named(str(tmp_path / "a.pt"), mark, seen) == str(place)
        seen = tuple((name, size + 1, at, node) for name, size, at, node in seen)
        assert discovery.named(str(tmp_path / "a.pt"), mark, seen) is None
