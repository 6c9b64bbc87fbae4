"""The curves of a run: as the frames are, and made again when their cache is gone."""

import json
import os
import shutil
import subprocess
import threading

import pytest

from supervise.catalog import BUILD, all_metrics
from supervise.core.model import Announced, Frame, Launched
from supervise.web import BOARDS, BuildingError, Page, Query, RunCurves, Settings
from tests.support import recorded_run
from tests.support.waiting import wait_until
from tests.support.web_page import SPIKE, STATIC, curves_of, decoded, page_of, record, refuse


def test_curves_are_built_once_there_are_threads(directory, tmp_path, monkeypatch):
    page = Page(Settings(directory=directory / "runs", cache=tmp_path / "cache"))
    curves = RunCurves(page.view("spike"), None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert curves.progress() == 0.0
    wait_until(lambda: curves.progress() == 1.0, "the curves")
    assert curves.facts()["frames"] == {"0": len(SPIKE)}


def cut_buckets(cache):
    for path in cache.rglob("rank0"):
        os.truncate(path, 100)


@pytest.mark.parametrize("harm", [shutil.rmtree, cut_buckets])
@pytest.mark.parametrize("is_list", [True, False], ids=["facts", "series"])
def test_curves_whose_cache_was_removed_are_made_again(tmp_path, harm, is_list):
    (tmp_path / "small.yaml").write_text(recorded_run.SMALL)
    record(tmp_path, "long", *[2.0] * 9000)
    page, query = page_of(tmp_path), Query(["train_loss_raw"], pixels=300)
    _, curves = page.curves("long")
    wait_until(lambda: curves.progress() == 1.0, "the curves")
    before, facts = curves.series(query), curves.facts()
    assert facts["cache"] is None
    harm(tmp_path / "cache")
    if is_list:
        assert (curves.facts()["building"], curves.facts()["frames"]) == (0.0, {})
    else:
        with pytest.raises(BuildingError):
            curves.series(query)
    wait_until(lambda: curves.progress() == 1.0, "the curves")
    assert curves.series(query) == before
    assert "in memory" in curves.facts()["cache"]
    page.close()


def test_a_second_start_reads_no_journal_again(tmp_path):
    (tmp_path / "small.yaml").write_text(recorded_run.SMALL)
    run = record(tmp_path, "long", *[2.0] * 9000)
    query = Query(["train_loss_raw"], pixels=300)
    series = []
    for _ in range(2):
        page = page_of(tmp_path)
        _, curves = page.curves("long")
        wait_until(lambda curves=curves: curves.progress() == 1.0, "the curves")
        series.append(curves.series(query))
        page.close()
        shutil.rmtree(run.journal_path, ignore_errors=True)
    assert series[0] == series[1]
    assert "from the page's cache" in curves.facts()["cache"]


RANKS = ("train_loss_raw", "forward_time", "other_time", "backward_time", "step_time")


SLOW = ("straggler_ratio", "straggler_rank", "straggler_part")


def test_the_slow_rank_is_named_with_since_when_and_at_what(tmp_path):
    """Rank 1 reads data for 0.2 s from step 100 on, in the bucket of 96; rank 0 waits for it."""
    (tmp_path / "small.yaml").write_text(recorded_run.SMALL)
    names = {0: (*RANKS, *SLOW), 1: RANKS}
    begin = (Launched(1, 2**22 + 7, 0), *(Announced(2, rank, 2, 7, names[rank]) for rank in (0, 1)))

    def frames(steps, last):
        for step in range(steps):
            late = 0.2 if 100 <= step < last else 0.0
            for rank, (other, backward) in enumerate(((0.0, late), (late, 0.0))):
                values = (2.0, 0.04, other, 0.06 + backward, 0.1 + late)
                ranks = (1.0 + late * 10, 1.0, 2.0) if rank == 0 else ()
                yield Frame((10 + step) * 10**9 + rank, rank, 0, step, (*values, *ranks))

    for name, last, expected in (
        ("slow", 300, {"rank": 1, "since": 96}),
        ("passed", 200, {}),
    ):
        path = tmp_path / "runs" / name
        policy = tmp_path / "small.yaml"
        recorded_run.record_run(path, frames(300, last), policy=policy, begin=begin)
        _, curves = page_of(tmp_path).curves(name)
        wait_until(lambda curves=curves: curves.progress() == 1.0, "the curves")
        facts = curves.facts()
        part = facts["slow"].pop("part", "")
        assert facts["slow"] == expected
        assert ("outside" in part) == (name == "slow")
    assert facts["own_s"] == pytest.approx({"0": 0.04, "1": 0.04})
    unread = RunCurves(page_of(tmp_path).view("slow"), None)
    assert unread.facts()["slow"] is None, "not built: not known"


def test_a_board_asks_for_what_a_run_can_have():
    names = {name for board in BOARDS.values() for name in board}
    assert names <= all_metrics().keys() and names.isdisjoint(BUILD)


def test_the_curves_are_the_frames(client):
    answer = curves_of(client, "spike", m=["train_loss_raw", "nobody"])
    header, [(x, values)] = decoded(answer.content)
    assert header["bucket"] == 1 and x[1] == tuple(range(len(SPIKE)))
    assert values["train_loss_raw"][2] == SPIKE and set(values["nobody"][3]) == {0.0}
    seconds = [b - a for a, b in zip(x[2], x[2][1:], strict=False)]
    assert seconds == pytest.approx([1.0] * (len(SPIKE) - 1))
    part = curves_of(client, "spike", m="train_loss_raw", lo=x[2][30], hi=x[2][50], x="time", px=20)
    header, [(x, values)] = decoded(part.content)
    assert header["bucket"] == 16 and max(values["train_loss_raw"][1]) == 8.0
    header, [(x, _)] = decoded(curves_of(client, "spike", m="train_loss_raw", px=2).content)
    assert header["stretches"][0]["last"] == len(SPIKE) - 1 > x[1][-1]
    header, [(x, _)] = decoded(curves_of(client, "spike", m="nobody", hi=10, px=2).content)
    assert header["stretches"][0]["last"] == x[1][-1] + header["bucket"] - 1 < len(SPIKE) - 1


IN_BUCKETS = """
const context = { COLUMNS: { step: 1 }, number: (n) => n,
  card: (title, sub, rows) => rows, h: (tag, about, rows) => rows, table: (head, rows) => rows,
  STEPS: 64 };
const [vm, fs] = [require("vm"), require("fs")];
vm.createContext(context);
for (const script of process.argv.slice(1)) {
  vm.runInContext(fs.readFileSync(script, "utf8"), context);
}
const [steps, one] = [[0, 64, 128], [1, 1, 1]];
const stretch = { attempt: 0, n: 3, last: 160, undone: [[150, 155]], x: [steps, steps],
  y: { loss: [one, one, [5, 6, 7], [64, 64, 33]] } };
const { counts, undone } = context.columns({ stretches: [stretch] }, "loss", "step");
const report = { what: { onset: { metric: "loss", step: 150 }, moves: [] },
  opened: { attempt: 0, step: 151 }, updated: { step: 160, attempt: 0 } };
const rows = (head) => context.stepTable(report, {}, [], [head], ["loss"], { loss: {} });
const noisy = [3, 5, 3, 5, 3, 5, 3, 5, 3, 9, 40];
const singles = { attempt: 0, n: 11, x: [noisy, noisy.map((_, i) => 140 + i)],
  y: { loss: [noisy, noisy, noisy, noisy.map(() => 1)] } };
const path = (from, ...mean) => {
  const [steps, ones] = [mean.map((_, i) => from + i), mean.map(() => 1)];
  return { counts: [steps, mean, mean, mean, ones, steps, steps], mean };
};
console.log(JSON.stringify([counts[6], undone.map((path) => path[6]),
  rows({ bucket: 64, stretches: [stretch] }), rows({ bucket: 64, stretches: [] }),
  rows({ bucket: 1, stretches: [singles] }),
  [[path(0, 5, 4, 3, 2), path(0, 5, 3)], [path(0, 5, 4), path(7, 3)]].map((runs) =>
    context.common(runs, 1).map(({ x, step, value }) => [x, step, value]))]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the scripts of the page")
def test_a_bucket_that_has_the_trouble_in_it_is_not_taken_for_what_was_before():
    scripts = [STATIC / "charts.js", STATIC / "incident.js"]
    output = subprocess.check_output(["node", "-e", IN_BUCKETS, *scripts])
    counts, undone, steps, without, calm, last = json.loads(output)
    assert (counts, undone) == ([0, 64], [[None, 128]]), "the newest bucket, undone in part"
    assert steps == [[None, 6, "–", 7]], "before, the first bad one, after"
    assert calm == [[None, 4, 40, 40]], "before: the median of the newest, as on the card"
    assert without == [[None, "–", "–", "–"]]
    assert last[0] == [[1, 1, 4], [1, 1, 3]], "two runs are compared where both have a step"
    assert last[1] == [[None, 1, 4], [None, 7, 3]], "nowhere: each at its own end"
