"""Counters and the newest steps go from one launch of a job to the next."""

import json

import pytest

TAPE = ("batch_fingerprint", "train_loss_raw", "learning_rate_scheduled")
COUNTERS = ("steps_seen", "skipped_updates", "tokens_seen", "tokens_applied")
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


def test_the_newest_steps_are_left_in_the_marks_where_a_launch_may_follow(probed, tmp_path):
    """All of them, since there are fewer than are kept."""
    job = probed.run(COUNTED, tape=True, marks=str(tmp_path))
    rows = json.loads((tmp_path / "tape.0.json").read_text())
    assert rows == [[f["step"], 0, *map(f.get, TAPE)] for f in job.frames] and len(rows) == 20


@pytest.mark.parametrize("late", [False, True])
def test_counters_go_on_from_a_checkpoint(probed, late):
    """Exact, with skipped steps before and behind it, and where values come a step late."""
    straight = probed.run(COUNTED, late=late)
    (notice,) = [n for n in straight.notices if n.kind == "checkpoint-saved"]
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
