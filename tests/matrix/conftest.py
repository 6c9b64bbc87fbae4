"""Every kind of job with the probe and without, and what its author would have computed."""

import math
import re

import pytest

from tests.support.probed_job import JobServer

LIBRARIES = ("transformers.trainer", "accelerate", "lightning.pytorch.trainer.trainer")
# Nothing is fetched, no progress bar is drawn, nothing is looked up on other devices.
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "ACCELERATE_USE_CPU": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

# Comes behind the preamble of the live tests. A step is told as one row, computed by hand.
PREAMBLE = """
class Ledger:
    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def params(self):
        return [p for o in self.optimizers for g in o.param_groups for p in g["params"]]

    def rates(self):
        groups = [g for o in self.optimizers for g in o.param_groups]
        names = ["learning_rate", *(f"learning_rate.{i}" for i in range(1, len(groups)))]
        return dict(zip(names, (float(g["lr"]) for g in groups)))

    def gradient(self):
        return norm(p.grad for p in self.params() if p.grad is not None)

    def before(self, **known):
        self.row = {**self.rates(), **known}
        self.old = [p.detach().double().clone() for p in self.params()]

    def after(self, **known):
        moved = norm(p.detach().double() - q for p, q in zip(self.params(), self.old))
        emit(**self.row, **known, update_norm=moved, update_to_weight=moved / norm(self.old))


def pass_by(step):
    if step == int(os.environ.get("BACK_AT", "-1")):
        barrier("back")
"""

KEEP = {"every": 3, "keep": 4, "max_bytes": 1 << 26}


class Pair:
    """The same script with the probe and without."""

    def __init__(self, probed, bare):
        self.probed = probed
        self.bare = bare

    def run(self, script, rel=1e-5, **config):
        """Run both to the end and compare all that is to be equal; return the one with the probe.

        A row that the script tells is a step: its frame is to hold each value of the row. Rows with
        `note` or `sha` are for the caller.
        """
        untouched = self.bare.run(script)
        job = self.probed.run(script, **config)
        assert job.output == untouched.output, "with the probe it computed something else"
        assert job.output[-1]["sha"] and said(job) == said(untouched)
        assert not untouched.marks
        self.compare(job, rel)
        return job

    @staticmethod
    def compare(job, rel=1e-5):
        """One rank, one frame for each row with what it says, and every collector still at work."""
        assert len(list((job.folder / "shm").iterdir())) == 1
        rows = [row for row in job.output if not {"sha", "note"} & set(row)]
        assert [frame["step"] for frame in job.frames] == list(range(len(rows)))
        for frame, row in zip(job.frames, rows, strict=True):
            for name, value in row.items():
                assert name in frame, (name, frame)
                assert close(frame[name], value, rel), (name, value, frame)
        collectors = job.segment().status()["collectors"]
        assert set(collectors.values()) == {"on"}, collectors

    def check_rollback(self, script, at, to):
        """Restore weights on the way; the loop goes on, in a new attempt."""
        job, answer = self.back(script, at, to)
        assert answer.ok, answer.error
        assert answer.result["step"] < to and answer.result["not_restored"] == []
        back = answer.result["from_step"] + 1
        assert [f["step"] for f in job.frames] == list(range(len(job.frames)))
        assert [f["attempt"] for f in job.frames] == [0] * back + [1] * (len(job.frames) - back)

    def back(self, script, at, to, **config):
        """Restore weights from before `to` while it stands at step `at`; return (job, answer)."""
        job = self.probed.start(script, environ={"BACK_AT": str(at)}, savepoints=KEEP, **config)
        answer = job.order("rollback", before_step=to, rewarm=None, barrier="back")
        self.probed.wait(job)
        return job, answer


def said(job):
    """Its standard error, less the times and numbers in torch's log."""
    return re.sub(r"^W\d{4} [\d:.]+ \d+ (\S+)\] \[\d+/\d+\]", r"\1", job.err, flags=re.M)


def close(seen, told, rel):
    """Equal within `rel`, and not finite together."""
    if told is None or not math.isfinite(told):
        return not math.isfinite(seen)
    return math.isclose(seen, told, rel_tol=rel, abs_tol=1e-12)


def pair_of_servers(make_folder, libraries):
    servers = [
        JobServer(make_folder, environ=QUIET | disabled, libraries=libraries, preamble=PREAMBLE)
        for disabled in ({}, {"SUPERVISE_DISABLE": "1"})
    ]
    yield Pair(*servers)
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def pair(make_folder):
    """Runs scripts that use torch alone."""
    yield from pair_of_servers(make_folder, ())


@pytest.fixture(scope="session")
def library_pair(make_folder):
    """Runs scripts that use a training library."""
    yield from pair_of_servers(make_folder, LIBRARIES)
