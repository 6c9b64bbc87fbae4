"""Training that moves to another thread is followed; threads that train at once are not mixed."""

import pytest

TRAINING = """
import sys
import threading

def training(seed):
    torch.manual_seed(seed)
    model = nn.Linear(8, 4)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 / seed)

def step(model, adam, tokens, pause=0.0):
    loss = F.cross_entropy(model(torch.randn(tokens, 8)), torch.randint(0, 4, (tokens,)))
    adam.zero_grad()
    loss.backward()
    told = norm(p.grad for p in model.parameters())
    adam.step()
    emit(thread=threading.current_thread().name, train_loss_raw=loss.item(),
         grad_global_norm=told, tokens_per_update=tokens)
    time.sleep(pause if "_supervise_probe" in sys.modules else 0.0)

def steps(count, *args):
    for _ in range(count):
        step(*args)

def start(name, *args):
    thread = threading.Thread(target=steps, args=args, name=name)
    thread.start()
    return thread
"""

MOVES_ON = """
one = training(1)
steps(20, *one, 6)
start("second", 90, *one, 8, 0.02).join()
finish(one[0])
"""


def same(frames, rows):
    """Whether the frames tell what the steps told."""
    assert len(frames) == len(rows)
    for frame, row in zip(frames, rows, strict=True):
        for name in ("train_loss_raw", "grad_global_norm", "tokens_per_update"):
            assert frame[name] == pytest.approx(row[name], rel=1e-5), (name, frame, row)


def test_training_that_goes_on_in_another_thread_is_followed(probed, bare):
    """The main thread waits for it: after a second the other one is the rank's, steps go on."""
    job = probed.run(TRAINING + MOVES_ON)
    assert job.output == bare.run(TRAINING + MOVES_ON).output

    *rows, _ = job.output
    frames = job.frames
    assert job.column("step") == list(range(len(frames)))
    assert 20 < len(frames) < 110  # what was made within the second has no frame
    same(frames[:20], rows[:20])
    same(frames[20:], rows[20 - len(frames) :])
    assert "step_time" not in frames[20] and max(f["step_time"] for f in frames[21:]) < 1.0
    (note,) = [n for n in job.notices if "thread" in n.message]
    assert "'second' trains from now on" in note.message
    assert set(job.segment().status()["collectors"].values()) == {"on"}


IN_TURN = """
one = training(1)
threads = []
for name in ("first", "second", "third"):  # none has the identity of one before
    gate = threading.Event()
    threads.append((gate, threading.Thread(
        target=lambda gate=gate: (gate.wait(), steps(10, *one, 6)), name=name)))
for _, thread in threads:
    thread.start()
for gate, thread in threads:
    gate.set()
    thread.join()
finish(one[0])
"""


def test_a_thread_that_ended_is_followed_by_the_next(probed):
    """Nobody is left to wait for: only the step that showed it has no frame."""
    job = probed.run(TRAINING + IN_TURN)
    *rows, _ = job.output
    del rows[20], rows[10]
    assert job.column("step") == list(range(28))
    same(job.frames, rows)


AT_ONCE = """
one, two = training(1), training(2)
over = threading.Event()

def trains_aside():
    while not over.is_set():  # were it to go on alone, it would be followed
        step(*two, 8, 0.005)

steps(3, *one, 6, 0.15)
aside = threading.Thread(target=trains_aside)
aside.start()
for _ in range(6):
    step(*one, 6)
    threading.Event().wait(0.15)
over.set()
aside.join()
"""


def test_of_threads_that_train_at_once_the_first_is_watched(probed):
    """However many steps the other one makes between two of it."""
    job = probed.run(TRAINING + AT_ONCE)
    same(job.frames, [row for row in job.output if row["thread"] == "MainThread"])
    assert not [n for n in job.notices if "thread" in n.message]


FROM_THE_START = """
together, trained = threading.Barrier(3), [training(1) for _ in range(3)]

def trains(i):
    together.wait()
    steps(60, *trained[i], 6 + i)
    together.wait()  # one that ended would be followed by another

threads = [threading.Thread(target=trains, args=(i,)) for i in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_of_threads_that_begin_together_one_is_watched(probed):
    """Each would make the segment; whoever is second there trains on unseen."""
    job = probed.run(TRAINING + FROM_THE_START)
    assert job.err == "" and "off" not in job.kinds()
    # The first ones may hold what others did at the same time: none had been seen to train before.
    whole = job.frames[10:]
    (tokens,) = {frame["tokens_per_update"] for frame in whole}
    rows = [row for row in job.output if row["tokens_per_update"] == tokens]
    assert len(rows) == 60 and len(whole) >= 40  # it may begin while another one makes it
    same(whole, rows[-len(whole) :])
