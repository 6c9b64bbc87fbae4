"""Each level of the page's curves against the frames themselves, on random journals."""

import math
import os
import random
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

from supervise.core.model import Announced, Frame, LateFrame, Launched, Tick
from supervise.store import Journal, RunDir, pack_event, read_rows
from supervise.web import Pyramid, trim_cache

NAMES = ("loss", "norm", "rate", "tokens_seen")
WINDOWS = 25


def write_journal(path, chance, frames=2600, segment_bytes=40_000):
    """Write frames of ranks and attempts that repeat steps, with renamed columns, NaN and gaps."""
    ranks = range(chance.choice((1, 1, 3)))
    names = {rank: list(NAMES[: chance.randint(2, 4)]) for rank in ranks}
    step = dict.fromkeys(ranks, 0)
    attempt, at_ns = 0, 5_000_000_000
    with_journal = Journal.open(path, segment_bytes=segment_bytes)
    with_journal.add(Launched(at_ns, 0, 1))
    for rank in ranks:
        with_journal.add(announced(at_ns, rank, names[rank]))
    for _ in range(frames):
        at_ns += chance.randint(1, 90_000_000)
        rank = chance.choice(ranks)
        if chance.random() < 0.004:
            attempt += 1
            for other in ranks:
                step[other] = max(0, step[other] - chance.choice((0, 0, 30, 400)))
        if chance.random() < 0.01:
            chance.shuffle(names[rank])
            if chance.random() < 0.5 and len(names[rank]) < 12:
                names[rank].append(f"extra.{len(names[rank])}")
            with_journal.add(announced(at_ns, rank, names[rank]))
        values = tuple(value(chance, name, step[rank]) for name in names[rank])
        with_journal.add(Frame(at_ns, rank, attempt, step[rank], values))
        step[rank] += chance.choice((1, 1, 1, 2, 50))
        if chance.random() < 0.05:
            with_journal.add(Tick(at_ns, ()))
    with_journal.flush()
    with_journal.close()


def announced(at_ns, rank, names):
    return Announced(at_ns, rank, 1, 1, tuple(names), 0, False)


def value(chance, name, step):
    if chance.random() < 0.1:
        return None
    if name == "tokens_seen":
        return 64.0 * step
    odd = chance.random()
    if odd < 0.02:
        return chance.choice((math.nan, math.inf, -math.inf))
    return chance.gauss(0, 1) * (1e30 if odd > 0.99 else 1.0)


def frames_by_rank(run):
    by_rank = {}
    for row in read_rows(run):
        by_rank.setdefault(row.rank, []).append(row)
    return by_rank


def compare(pyramid, rows, rank, metrics, axis, low, high, pixels):
    """Return how many buckets were compared; each has what its frames have, and none is missed."""
    curves = pyramid.curves(rank, metrics, axis, low, high, pixels)
    count = 0
    for number, (stretch, x, values) in enumerate(curves.stretches):
        later = curves.stretches[number + 1 :]
        end = later[0][0].ordinal if later else len(rows)
        edges = [*map(int, x[0]), end]
        whole = stretch.ordinal + stretch.length == end
        assert whole, "stretches follow each other"
        for index in range(x.shape[1]):
            last = edges[index + 1]
            if index + 1 == x.shape[1]:  # its own end: at most a bucket
                last = min(end, next_edge(curves, stretch, edges[index]))
            inside = rows[edges[index] : last]
            assert inside[0].step == x[1, index]
            for column, metric in enumerate(metrics):
                present = [r.values[metric] for r in inside if metric in r.values]
                check_bucket(present, values[column, :, index])
                count += 1
        if axis == "step":
            wanted = [row.step for row in rows[stretch.ordinal : end] if low <= row.step <= high]
            if wanted:
                assert x.shape[1] and x[1, 0] <= wanted[0], "the window is covered"
    return count


def next_edge(curves, stretch, ordinal):
    """The end of the last bucket that is shown: known only by its size, which is aligned."""
    done = ordinal - stretch.ordinal
    size = curves.bucket
    while done % size:
        size //= 4
        size = max(size, 16) if curves.bucket > 1 else 1
        if size == 16 and done % 16:
            return ordinal + 16
    return ordinal + size


def check_bucket(present, bucket):
    finite = [v for v in present if math.isfinite(v)]
    low, high, mean, count = map(float, bucket)
    assert math.floor(abs(count)) == len(finite)
    assert (count < 0) == (len(finite) < len(present))
    if finite:
        assert low == pytest.approx(min(finite), rel=1e-6)
        assert high == pytest.approx(max(finite), rel=1e-6)
        scale = max(map(abs, finite))
        assert mean == pytest.approx(sum(finite) / len(finite), rel=1e-5, abs=2e-6 * scale)
    else:
        assert math.isnan(mean)


@pytest.mark.parametrize("seed", range(4))
def test_each_bucket_of_random_windows_is_what_its_frames_are(tmp_path, seed):
    chance = random.Random(seed)
    run = RunDir(tmp_path, "r")
    write_journal(run.journal_path, chance)
    by_rank = frames_by_rank(run)
    pyramid = Pyramid(run.journal_path, tmp_path / "cache" if seed % 2 else None, run="r")
    while pyramid.update(20_000):
        pass
    assert {rank: built.length for rank, built in pyramid.ranks.items()} == {
        rank: len(rows) for rank, rows in by_rank.items()
    }
    compared = 0
    for _ in range(WINDOWS):
        rank = chance.choice(list(by_rank))
        rows = by_rank[rank]
        axis = chance.choice(("step", "step", "time"))
        metrics = chance.sample([*pyramid.ranks[rank].columns, "nobody"], 2)
        ends = sorted(chance.choice(rows).step + chance.randint(-20, 20) for _ in range(2))
        if axis == "time" or chance.random() < 0.3:
            ends = [-1e30, 1e30]
        pixels = chance.choice((2, 7, 40, 300, 4000))
        compared += compare(pyramid, rows, rank, metrics, axis, *ends, pixels)
    assert compared > 400


def snapshot(pyramid):
    """All that a pyramid answers, as one value."""
    answers = []
    for rank, built in sorted(pyramid.ranks.items()):
        for pixels in (5, 60, 4000):
            curves = pyramid.curves(rank, list(built.columns), "step", -1e9, 1e9, pixels)
            for stretch, x, values in curves.stretches:
                planes = x[:3].tobytes(), np.nan_to_num(values, nan=-7).tobytes()
                answers.append((rank, pixels, curves.bucket, stretch.attempt, *planes))
    return answers


def test_a_live_build_equals_one_from_the_start_wherever_the_writer_is(tmp_path):
    chance = random.Random(3)
    source = tmp_path / "source"
    write_journal(source, chance, frames=900, segment_bytes=1 << 20)
    raw = (source / "00000.jrn").read_bytes()
    live = tmp_path / "live"
    live.mkdir()
    follower = Pyramid(live, tmp_path / "cache", run="r")
    size = 0
    while size < len(raw):
        size = min(len(raw), size + chance.choice((1, 3, 40, 700, 9000)))
        (live / "00000.jrn").write_bytes(raw[:size])
        follower.update()
        if chance.random() < 0.03:
            fresh = Pyramid(live)
            fresh.update()
            assert snapshot(follower) == snapshot(fresh)
    whole = Pyramid(source)
    whole.update()
    assert snapshot(follower) == snapshot(whole)


KILLED = """
import os, sys
from pathlib import Path
from supervise.web import Pyramid
built = Pyramid(Path(sys.argv[1]), Path(sys.argv[2]), run="r", save_bytes=30_000)
while built.update(7_000):
    if built.read_bytes > int(sys.argv[3]):
        os.kill(os.getpid(), 9)
built.save()
"""


def test_a_build_that_was_killed_goes_on_and_gives_the_same(tmp_path):
    journal, cache = tmp_path / "journal", tmp_path / "cache"
    write_journal(journal, random.Random(11), frames=6000)
    ended = subprocess.run([sys.executable, "-c", KILLED, journal, cache, "150000"], check=False)
    assert ended.returncode == -9
    whole, resumed = Pyramid(journal), Pyramid(journal, cache, run="r")
    assert 0 < resumed.read_bytes < resumed.size_bytes() - 30_000, (
        "what was saved is not read again"
    )
    whole.update()
    resumed.update()
    assert snapshot(resumed) == snapshot(whole)


def test_a_cache_of_another_run_or_with_damage_is_made_again(tmp_path):
    journal, cache = tmp_path / "journal", tmp_path / "cache"
    write_journal(journal, random.Random(5), frames=500)
    first = Pyramid(journal, cache, run="r")
    first.update()
    first.save()
    second = Pyramid(journal, cache, run="r")
    assert not second.is_cached, "one process has it"
    first.close()
    assert Pyramid(journal, cache, run="other").read_bytes == 0
    state = (cache / "state").read_bytes()
    (cache / "state").write_bytes(state[: len(state) // 2])
    assert Pyramid(journal, cache, run="r").read_bytes == 0


def test_what_a_thinned_journal_lost_is_still_in_the_cache(tmp_path):
    journal, cache = tmp_path / "journal", tmp_path / "cache"
    write_journal(journal, random.Random(6), frames=3000)
    pyramid = Pyramid(journal, cache, run="r")
    pyramid.update()
    before = snapshot(pyramid)[:2]
    writer = Journal.open(journal)
    writer.replace_piece(writer.plan_next_thinning())
    writer.append(Frame(10**12, 0, 99, 7, (1.0, 2.0)))
    writer.close()
    pyramid.update()
    curves = pyramid.curves(0, ["loss"], "step", -1e9, 1e9, 4000)
    assert curves.stretches[-1][0].attempt == 99 and curves.bucket == 16 and pyramid.cut
    assert sum(x.shape[1] for _, x, _ in curves.stretches) >= len(before)
    fresh = Pyramid(journal)
    fresh.update()
    assert 0 < fresh.ranks[0].length < pyramid.ranks[0].length and fresh.cut


def test_a_damaged_record_ends_the_curves_with_a_sentence(tmp_path):
    journal = tmp_path / "journal"
    write_journal(journal, random.Random(7), frames=1500)
    for path in (journal / "00000.jrn", max(journal.glob("*.jrn"))):
        whole = path.read_bytes()
        raw = bytearray(whole)
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
        pyramid = Pyramid(journal)
        pyramid.update()
        assert path.name in pyramid.damage, "also in the one that is written"
        assert 0 < pyramid.ranks[0].length < 1500
        path.write_bytes(whole)
    shutil.rmtree(journal)
    assert Pyramid(journal).update() == 0


def test_frames_beside_a_large_record_are_shown_themselves(tmp_path):
    large = {f"metric.{number}": 1.0 for number in range(20_000)}
    journal = Journal.open(tmp_path)
    journal.add(announced(1, 0, ["loss"]))
    for step in range(20):
        journal.add(Frame(step, 0, 0, step, (float(step),)))
        if step == 10:
            journal.add(LateFrame(step, "build", 0, 3, large))
    journal.flush()
    journal.close()
    pyramid = Pyramid(tmp_path)
    pyramid.update()
    curves = pyramid.curves(0, ["loss"], "step", 0, 100, 400)
    assert curves.bucket == 1 and curves.stretches[0][2][0, 2].tolist() == [*range(20)]


def test_nothing_is_lost_where_a_segment_ends_while_it_is_read(tmp_path):
    frames = 3000

    def write():
        journal = Journal.open(tmp_path, segment_bytes=400)
        journal.append(announced(1, 0, ["loss"]))
        for step in range(frames):
            journal.append(Frame(step, 0, 0, step, (1.0,)))
        journal.close()

    pyramid, writer = Pyramid(tmp_path), threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        pyramid.update()
    pyramid.update()
    assert not pyramid.damage and pyramid.ranks[0].length == frames


def test_a_record_that_is_being_written_is_no_damage(tmp_path, monkeypatch):
    journal = Journal.open(tmp_path)
    journal.append(announced(1, 0, ["loss"]))
    for step in range(9):
        journal.append(Frame(step, 0, 0, step, (1.0,)))
    journal.close()
    path, read = tmp_path / "00000.jrn", os.pread
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4])
    pyramid = Pyramid(tmp_path)
    pyramid.update()
    assert 0 < pyramid.ranks[0].length < 8

    def read_before_the_write(fd, size, offset):
        block = read(fd, size, offset)
        if offset:
            path.write_bytes(whole)
        return block

    monkeypatch.setattr(os, "pread", read_before_the_write)
    while pyramid.update() or pyramid.ranks[0].length < 9:
        assert not pyramid.damage


def test_only_curves_that_nobody_uses_are_removed(tmp_path):
    journal, home = tmp_path / "journal", tmp_path / "cache"
    write_journal(journal, random.Random(5), frames=50)
    built = {name: Pyramid(journal, home / name, run="r") for name in ("free", "used", "newest")}
    for pyramid in built.values():
        pyramid.update()
        pyramid.save()
    for name in ("free", "newest"):
        built[name].close()
    (home / "mine").mkdir()
    (home / "mine" / "lock").touch()
    os.utime(home / "newest" / "state", (4e9, 4e9))
    trim_cache(home, 0)
    assert {path.name for path in home.iterdir()} == {"used", "newest", "mine"}


def test_a_journal_of_another_version_is_left_alone(tmp_path):
    (tmp_path / "00000.jrn").write_bytes(b"SUPVJRN9" + bytes(8) + bytes(pack_event(Tick(1, ()))[1]))
    pyramid = Pyramid(tmp_path)
    assert pyramid.update() == 0 and not pyramid.ranks
