"""A script that cannot resume goes on in another process, from a savepoint of the one before."""

import json
import os
import shutil
import textwrap
from pathlib import Path

import pytest

from tests.support import supervised_run
from tests.support.probed_job import PACKAGE, PREAMBLE

FAST_TORCH = os.pathsep.join([str(PACKAGE / "inject"), supervised_run.FAST_TORCH])

SCRIPT = """
import threading

kind = os.environ["KIND"]
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=40)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=kind == "amp")
numbers = torch.Generator().manual_seed(3)


class Progress:
    def __init__(self):
        self.step, self.best, self.losses, self.by_kind = 0, None, [], {"all": 0}


def get_batch():
    x = torch.randn(16, 8, generator=numbers)
    return x, x.sum(1, keepdim=True) + torch.randn(16, 1)


def train():
    progress, smooth, shadow = Progress(), None, None
    X, Y = get_batch()
    while progress.step < 30:
        while "DEATH" in os.environ and threading.active_count() > 1:
            time.sleep(0.001)  # until the savepoint is on disk
        if os.environ.get("DEATH") == str(progress.step):
            barrier("written")
            os._exit(1)
        with torch.autocast("cpu", enabled=kind == "amp"):
            loss = (model(X) - Y).square().mean() / 2
        X, Y = get_batch()
        scaler.scale(loss).backward()
        if progress.step % 2 or kind != "accumulate":
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
        value = loss.item()
        smooth = value if smooth is None else 0.9 * smooth + 0.1 * value
        weight = model[0].weight.detach()
        shadow = weight.clone() if shadow is None else shadow.lerp(weight, 0.1)
        progress.best = min(value, progress.best or value)
        progress.losses.append(value)
        progress.by_kind["all"] += 1
        progress.step += 1
    emit(smooth=smooth, shadow=shadow.sum().item(), scale=scaler.get_scale(), **progress.__dict__)
    finish(model)


train()
"""
FOR = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()
"""


def portable(folder, every=5, keep=2):
    where = {"every": every, "directory": str(folder / "savepoints"), "keep": keep}
    return {"savepoints": {"every": 5, "keep": 2, "max_bytes": 1 << 24, "portable": where}}


def resumed(path, step, **config):
    return {
        "resume": {"how": "savepoint", "path": str(path)},
        "attempt": 1,
        "first_step": step + 1,
        **config,
    }


def first_life(server, folder, kind, death=17):
    """Run until step `death`; returns the paths of the savepoints by step."""
    environ = {"KIND": kind, "DEATH": str(death)}
    (folder / "savepoints").mkdir()
    (folder / "savepoints" / ".savepoint-000000000.pt.0123").touch()  # of one that was killed
    job = server.start(SCRIPT, environ=environ, **portable(folder))
    job.reached("written")
    job.go("written")
    server.wait(job, code=1)
    return job, {n.data["step"]: n.data["path"] for n in saved(job)}


@pytest.fixture(scope="module")
def life(probed, tmp_path_factory):
    """One that ended at step 17: the job, and its savepoints by step."""
    return first_life(probed, tmp_path_factory.mktemp("life"), "plain")


def saved(job):
    return [n for n in job.notices if n.kind == "checkpoint-saved"]


@pytest.mark.parametrize("kind", ["amp", "accumulate"])
def test_a_new_process_ends_as_one_that_never_died(probed, bare, tmp_path, kind):
    """Weights and the script's own counters; its first step is thrown away and has no frame."""
    job, paths = first_life(probed, tmp_path, kind)
    step, path = max(paths.items())
    assert all(n.step == n.data["step"] + 1 and n.data["how"] == "savepoint" for n in saved(job))
    assert sorted(p.name for p in (tmp_path / "savepoints").iterdir()) == sorted(
        f"savepoint-{n:09d}.pt{end}" for n in sorted(paths)[-2:] for end in ("", ".sha256")
    )
    again = probed.run(SCRIPT, environ={"KIND": kind}, **resumed(path, step))
    straight = bare.run(SCRIPT, environ={"KIND": kind})
    assert again.output == straight.output
    assert [n.data["not_restored"] for n in again.notices if n.kind == "resumed"] == [[]]
    assert again.frames[0]["step"] == step + 1
    assert {f["attempt"] for f in again.frames} == {1}
    assert again.frames[0]["steps_seen"] == step + 2


def test_python_itself_starts_both(launch, bare, tmp_path):
    """The same with two interpreters, which share no address: nothing goes by identity."""
    straight = bare.run(SCRIPT, environ={"KIND": "plain"})
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "written").touch()
    script = PREAMBLE + SCRIPT
    environ = {"KIND": "plain", "PYTHONPATH": FAST_TORCH}
    job = launch(
        script, config=portable(tmp_path), environ={**environ, "DEATH": "17"}, folder=folder, code=1
    )
    (path,) = (n.data["path"] for n in saved(job) if n.data["step"] == 10)
    again = launch(script, config=resumed(path, 10), environ=environ)
    assert [n.kind for n in again.notices] == ["resumed"]
    assert again.output == straight.output


def test_what_goes_on_is_compared_with_the_tape_of_the_launch_before(probed, life, tmp_path):
    """Batch, loss and rate of the first step, which the former process left in the marks."""
    job, paths = life
    rows = [[f["step"], 0, *map(f.get, TAPE)] for f in job.frames]
    for change, ok in ((0.0, True), (1.0, False)):
        folder = tmp_path / str(ok)
        folder.mkdir()
        changed = [[*row[:3], row[3] + change, row[4]] for row in rows]
        (folder / "tape.0.json").write_text(json.dumps(changed))
        config = resumed(paths[10], 10, marks=str(folder))
        again = probed.run(SCRIPT, environ={"KIND": "plain"}, **config)
        (told,) = (n.data for n in again.notices if n.kind == "continuity")
        assert told["step"] == 11 and told["fingerprint"] == "same" and told["ok"] is ok
        assert told["loss"] == {"was": rows[11][3] + change, "is": rows[11][3]}


def test_the_newest_steps_are_left_in_the_marks_where_a_launch_may_follow(probed, tmp_path):
    """All of them, since there are fewer than are kept."""
    script = "for n in range(60):\n    step()\n"
    loop = """
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()
    """
    job = probed.run(textwrap.dedent(loop) + script, tape=True, marks=str(tmp_path))
    rows = json.loads((tmp_path / "tape.0.json").read_text())
    assert rows == [[f["step"], 0, *map(f.get, TAPE)] for f in job.frames] and len(rows) == 60


TAPE = ("batch_fingerprint", "train_loss_raw", "learning_rate_scheduled")


def test_where_it_would_not_be_exact_nothing_is_written(probed, tmp_path):
    job = probed.run(FOR, **portable(tmp_path, every=1))
    (said,) = (n.message for n in job.notices if n.kind == "portable-unavailable")
    assert "drives the step from a for statement" in said and len(job.frames) == 12
    assert not (tmp_path / "savepoints").exists()


CHANGED = SCRIPT.replace("/ 2\n", "/ 3\n")


@pytest.mark.parametrize(
    ("script", "damage", "reason"),
    [
        (CHANGED, False, "the code of train differs from that of the savepoint"),
        (FOR, False, "drives the step from a for statement"),
        (SCRIPT, True, "its hash differs from the one beside it"),
        (SCRIPT, None, "No such file"),
    ],
)
def test_what_is_of_another_script_is_refused_and_the_job_begins_anew(
    probed, life, tmp_path, script, damage, reason
):
    there, path = Path(life[1][15]), tmp_path / "savepoint.pt"
    if damage is not None:
        path.write_bytes(there.read_bytes()[: -1 if damage else None])
        shutil.copy(f"{there}.sha256", f"{path}.sha256")
    job = probed.run(script, environ={"KIND": "plain"}, **resumed(path, 15))
    (refusal,) = (n for n in job.notices if n.kind == "resume-refused")
    assert reason in refusal.data["reason"]
    assert job.frames[-1]["step"] == (11 if script is FOR else 29)


COUNTED = """
start = int(os.environ.get("START", "0"))
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
for step in range(start, 20):
    labels = torch.arange(8 + step % 3) % 4
    loss = torch.nn.functional.cross_entropy(model(torch.ones(len(labels), 8)), labels)
    scaler.scale(loss * (float("inf") if step in (5, 14) else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if step == 11:
        torch.save(model.state_dict(), "a.pt")
"""
COUNTERS = ("steps_seen", "skipped_updates", "tokens_seen", "tokens_applied")


@pytest.mark.parametrize("late", [False, True])
def test_counters_go_on_from_a_checkpoint(probed, late):
    """Exact, with skipped steps before and behind it, and where values come a step late."""
    straight = probed.run(COUNTED, late=late)
    (notice,) = saved(straight)
    counted = {name: straight.frames[11][name] for name in COUNTERS}
    assert notice.data["counters"] == counted and counted["skipped_updates"] == 1

    counters = {"1": dict.fromkeys(COUNTERS, 3.0), "all": counted}
    config = {"attempt": 1, "first_step": 12, "counters": counters, "late": late}
    again = probed.run(COUNTED, environ={"START": "12"}, **config)

    for was, now in zip(straight.frames[12:], again.frames, strict=True):
        assert [now[name] for name in COUNTERS] == [was[name] for name in COUNTERS]


def test_counters_of_a_job_that_does_not_resume_begin_at_zero(probed):
    config = {"counters": {"all": dict.fromkeys(COUNTERS, 9.0)}, "attempt": 1, "first_step": 12}
    job = probed.run(COUNTED, **config, resume={"how": "library", "path": "/a"})
    assert job.notices[0].kind == "resume-refused"
    assert job.frames[0]["steps_seen"] == 1 and job.frames[0]["tokens_seen"] == 8
