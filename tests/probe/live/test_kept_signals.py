"""Signals that come to the job itself: kept while the supervisor offers to hold them."""

import signal
import time

import pytest

SCRIPT = """
import signal, subprocess

own = lambda *_: emit(own=True)
signal.signal(signal.SIGUSR2, own)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({loop}):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
barrier("go")
{body}
"""
ENDS = """
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGUSR2)
barrier("more")
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(9)
"""
FORK = """
ready, tell = os.pipe()
pid = os.fork()
if not pid:
    os.write(tell, b"x")  # a signal before the fork has returned is lost with any handler
    time.sleep(9)
    os._exit(0)
os.read(ready, 1)
"""
EXEC = "pid = subprocess.Popen(['sleep', '9']).pid\n"
CHILDREN = """
os.kill(pid, signal.SIGTERM)
emit(child=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
signal.signal(signal.SIGTERM, own)
os.kill(os.getpid(), signal.SIGTERM)
"""


def started(probed, body, until_ns=1 << 62, loop=3):
    """Start a job, and let it go on when the offer is made."""
    job = probed.start(SCRIPT.format(body=body, loop=loop), keep_signals=True)
    job.reached()
    job.segment().defer_job_signals(until_ns)
    job.go()
    return job


def test_it_is_kept_while_it_may_be_held_and_then_does_what_it_does(probed):
    """A handler of the job stays the job's."""
    job = started(probed, ENDS)
    job.reached("more")
    assert job.segment().status()["kept_signals"] == ["SIGTERM", "SIGUSR1"]
    job.segment().defer_job_signals(0)
    job.go("more")
    probed.wait(job, -signal.SIGUSR1)
    assert [n.data["signal"] for n in job.notices if "signal" in n.data] == ["SIGTERM"]
    assert job.output == [{"own": True}]


def test_the_next_training_of_the_process_keeps_them_too(probed):
    steps = """
others = nn.Linear(4, 1)
optimizer = torch.optim.SGD(others.parameters(), lr=0.1)
for step in range(3):
    others(torch.ones(2, 4)).sum().backward()
    optimizer.step()
barrier("more")
"""
    job = started(probed, steps, loop=70)
    job.reached("more")
    assert any("a new training" in notice.message for notice in job.notices)
    assert job.segment().status()["kept_signals"] == ["SIGTERM", "SIGUSR1"]
    job.go("more")
    probed.wait(job)


@pytest.mark.parametrize("start", [FORK, EXEC], ids=["fork", "exec"])
def test_children_are_as_they_would_be(probed, start):
    """Of a fork and of a program that is started; a handler that the job sets later counts."""
    job = started(probed, start + CHILDREN)
    probed.wait(job)
    assert job.output == [{"child": -signal.SIGTERM}, {"own": True}]


def test_without_an_offer_it_ends_the_process(probed):
    body = "os.kill(os.getpid(), 15); time.sleep(9)"
    probed.wait(started(probed, body, time.monotonic_ns() - 1), -signal.SIGTERM)
