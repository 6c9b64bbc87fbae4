"""What a process with torch records of an error: in a worker of its loader, and in a thread."""

import json
import time

import psutil

from supervise.runtime import RankSurvey, RankView, ask_for_stacks
from tests.support.waiting import wait_until

SCRIPT = """
import threading
from torch.utils.data import DataLoader, Dataset

class Records(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise ValueError("bad record 2")
        return torch.ones(2)

def prefetch():
    raise KeyError("shard")

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
thread = threading.Thread(target=prefetch, name="prefetch")
thread.start()
thread.join()
for batch in DataLoader(Records(), num_workers=1):
    model(batch).sum().backward()
    optimizer.step()
"""


def test_an_error_of_a_loader_worker_and_one_of_a_thread(probed, bare):
    """The worker's own place, not that of the loop; the job prints what it prints without us."""
    job, alone = probed.run(SCRIPT, code=1), bare.run(SCRIPT, code=1)
    paths = sorted((job.folder / "probe").glob("failure.*.json"))
    thread, end = sorted((json.loads(path.read_text()) for path in paths), key=lambda r: r["at_ns"])

    lines = (job.folder / "train.py").read_text().split("\n")
    assert (end["type"], end["message"]) == ("ValueError", "bad record 2")
    assert end["within"] == "DataLoader worker process 0"
    assert "bad record 2" in lines[end["line"] - 1] and end["function"] == "__getitem__"
    assert (thread["kind"], thread["type"], thread["thread"]) == ("thread", "KeyError", "prefetch")
    assert 'KeyError("shard")' in lines[thread["line"] - 1]
    assert end["rank"] == 0 and end["step"] == 2
    ends = [found.err.rstrip().split("\n")[-1] for found in (job, alone)]
    assert ends == ["ValueError: bad record 2"] * 2


DEADLOCK = """
import threading
from torch.utils.data import DataLoader, Dataset

lock = threading.Lock()

class Records(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 4:
            open("stuck", "w").close()
            lock.acquire()
            lock.acquire()
        return torch.ones(2)

model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(Records(), num_workers=2):
    model(batch).sum().backward()
    optimizer.step()
"""


def test_a_worker_that_deadlocks_before_the_loop_is_a_rank_is_named(probed):
    """Workers are forked before the first step, when nothing is known of the process yet."""
    job = probed.start(DEADLOCK)
    wait_until((job.folder / "stuck").exists, "the deadlock")
    members = [psutil.Process(job.pid), *psutil.Process(job.pid).children()]
    view = {0: RankView(job.pid, seen_ns=time.monotonic_ns())}

    def stack(pid):
        try:
            return ask_for_stacks(pid, job.folder / "probe", forks=True)
        except OSError:  # it is too young to be asked
            return ""

    def explained():
        text = RankSurvey(view, members).finish({0: 3}, stack).text
        return text if "waits for a lock" in text else ""

    said = wait_until(explained, "the worker's stack")
    for worker in members[1:]:
        worker.kill()
    probed.wait(job, 1)

    lines = (job.folder / "train.py").read_text().split("\n")
    place = 1 + max(number for number, line in enumerate(lines) if "lock.acquire()" in line)
    assert said.startswith("rank 0 waits for data in next(loader) at train.py:")
    assert said.endswith(
        f", after step 3; worker pid {members[1].pid} waits for a lock at train.py:{place} in "
        "__getitem__()"
    )
