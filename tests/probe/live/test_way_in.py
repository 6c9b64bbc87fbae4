"""How the probe gets into a job, and how it stays out of everything else."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support import supervised_run

INJECT = Path(__file__).parents[3] / "probes/supervise_probe/inject"
FAST_TORCH = {"PYTHONPATH": os.pathsep.join([str(INJECT), supervised_run.FAST_TORCH])}

TRAIN = """
import sys, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_a_plain_script(launch):
    """Marks for every stage, frames in the segment, its end recorded, not a word on its streams."""
    job = launch(TRAIN + "import sys\nprint('done')\nsys.exit(5)", code=5)
    assert [frame["step"] for frame in job.frames] == [0, 1, 2, 3, 4]
    assert sorted(job.marks) == ["armed", "boot", "failure", "stacks"]
    assert (job.folder / "out").read_text() == "done\n" and job.err == ""
    assert job.segment().end() == (5, "") and job.segment().beat().phase == "exiting"
    assert oct(job.segment().path.stat().st_mode)[-3:] == "600"


def test_an_order_that_cannot_be_followed_switches_the_probe_off_whole(probed):
    savepoints = {"every": "often", "keep": 1, "max_bytes": 1 << 20}
    job = probed.run(TRAIN + "print(step)", savepoints=savepoints)
    assert (job.folder / "out").read_text() == "4\n" and job.err == ""
    assert job.marks["off"].startswith("probe.json cannot be followed: ValueError: ")
    assert job.frames == [] and job.segment().end() is None
    status = job.segment().status()
    assert (status["tier"], status["savepoints"]) == ("T0", [])


NAMES = """
import sys, os
import probe, probes            # the job's own
assert probe.mine and probes.mine
import supervise_probe          # by name: the one that is in the process
assert supervise_probe is sys.modules["_supervise_probe"] and supervise_probe._probe is None
import importlib.util, inspect
assert importlib.util.find_spec("torch").origin.endswith("__init__.py")
import torch
assert type(torch.__loader__).__name__ == type(torch.__spec__.loader).__name__ == "SourceFileLoader"
assert inspect.getsource(torch.typename)
assert supervise_probe._probe is not None and supervise_probe.__name__ == "_supervise_probe"
assert not [p for p in sys.path if "inject" in p]
assert os.environ["PYTHONPATH"].endswith("inject")
try:
    import sitecustomize
except ImportError:
    print("no sitecustomize")
"""


def test_it_leaves_no_names_behind(launch, make_folder):
    """Not on sys.path, not in the job's namespace; a job's own `probe` and `probes` are its own."""
    folder = make_folder()
    for name in ("probe", "probes"):
        (folder / f"{name}.py").write_text("mine = True")
    job = launch(NAMES, "-X", "frozen_modules=on", folder=folder)
    assert (folder / "out").read_text() in ("no sitecustomize\n", "")
    assert job.err == "" and "off" not in job.marks


@pytest.mark.parametrize("breaks", [False, True], ids=["good", "broken"])
def test_the_sitecustomize_that_it_hides_runs_too(launch, make_folder, breaks):
    """Under its own name, with its own errors; Python reports those as it always does."""
    folder, theirs = make_folder(), make_folder()
    text = "import sys\nprint('theirs', __name__)\nmarker = 1\n" + "1 / 0" * breaks
    (theirs / "sitecustomize.py").write_text(text)
    environ = {"PYTHONPATH": os.pathsep.join([str(INJECT), str(theirs)])}
    job = launch(
        "import sys; print(getattr(sys.modules.get('sitecustomize'), 'marker', None))",
        environ=environ,
        folder=folder,
    )
    out = (folder / "out").read_text().split("\n")
    assert out[:2] == ["theirs sitecustomize", "None" if breaks else "1"]
    assert ("ZeroDivisionError" in job.err) == breaks
    assert list(job.marks) == ["boot"]


def test_the_kill_switch(launch):
    """SUPERVISE_DISABLE: as if there were no probe; nothing waits for torch."""
    code = "import sys; print([f for f in sys.meta_path if 'sitecustomize' in repr(f)])"
    job = launch(code, environ={"SUPERVISE_DISABLE": "1"})
    assert job.marks == {} and (job.folder / "out").read_text() == "[]\n"


def test_an_isolated_python_is_not_reached(launch, make_folder):
    """`python -I` reads no environment; without a mark the supervisor can tell."""
    folder = make_folder()
    (folder / "train.py").write_text("print('ran')")
    job = launch(None, "-I", "train.py", folder=folder)
    assert job.marks == {} and (folder / "out").read_text() == "ran\n"


def test_a_job_without_torch_loads_nothing(launch):
    """But for what is built into the interpreter: exit handlers, and stacks of fatal signals."""
    code = "import sys; print(sorted(m for m in sys.modules))"
    job = launch(code)
    bare = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": ""}, check=True
    )
    ours = set(eval((job.folder / "out").read_text())) - set(eval(bare.stdout))
    assert ours == {"atexit", "faulthandler"} and list(job.marks) == ["boot"]


def test_what_trains_nothing_is_spared(launch):
    assert launch(None, "-m", "pip", "--version").marks == {}
    tracker = "from multiprocessing.resource_tracker import main; print(main)"
    assert launch(None, "-c", tracker).marks == {}


FORKS = """
import os
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(steps):
    for step in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

train(3)
for child in range(2):
    if os.fork() == 0:
        if child:
            os.environ["RANK"] = "1"
            train(2)
        raise SystemExit
    os.wait()
train(3)
"""


def test_a_forked_child_starts_clean(probed):
    """It never writes to its parent's segment; one that trains has a segment of its own."""
    job = probed.run(FORKS)
    first, second = sorted((job.folder / "shm").iterdir())
    assert first.name.startswith("rank-0.") and second.name.startswith("rank-1.")
    assert [frame["step"] for frame in job.frames] == list(range(6))


INHERITS = """
import gc, os, sys, time, weakref
model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
probe = sys.modules["_supervise_probe"]._probe

def buffers():
    kinds = [thing for thing in gc.get_objects() if type(thing).__name__ == "TensorCopies"]
    return sum(slot.buffer is not None for copies in kinds for slot in copies.slots)

def unnamed():
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    targets = [os.readlink(link) for link in links if os.path.lexists(link)]
    return sum(target.startswith(SPILL) for target in targets)

for step in range(8):
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
read, write = os.pipe()
before = buffers(), unnamed()
if os.fork() == 0:
    gc.collect()
    del optimizer
    gc.collect()
    os.write(write, f"{buffers()} {unnamed()}".encode())
    os._exit(0)
os.wait()
emit(before=before, child=os.read(read, 99).decode(), after=(buffers(), unnamed()))
"""


def test_a_forked_child_frees_no_savepoint_and_holds_no_file_of_one(probed, tmp_path):
    """Pinned memory calls CUDA when it is freed; a file without a name stays while it is open."""
    room = 64 * 65 * 4 * 3 // 2
    keep = {"every": 2, "keep": 3, "max_bytes": room, "spill": str(tmp_path)}
    (row,) = probed.run(f"SPILL = {str(tmp_path)!r}" + INHERITS, savepoints=keep).output
    memory, files = row["before"]
    assert memory and files and row["after"] == row["before"]
    assert row["child"] == f"{memory} 0"


def test_no_room_in_shared_memory_switches_the_probe_off(probed):
    job = probed.run(TRAIN, shm="/proc/1/none")
    assert "no segment in /proc/1/none" in job.marks["off"]
    assert job.err == ""


def test_a_torch_that_cannot_be_watched_switches_the_probe_off(launch, make_folder):
    folder = make_folder()
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("answer = 42")
    job = launch("import torch; print(torch.answer)", folder=folder)
    assert (folder / "out").read_text() == "42\n" and "AttributeError" in job.marks["off"]


@pytest.mark.parametrize("content", ["{", "{}"])
def test_a_damaged_probe_json_switches_the_probe_off(launch, make_folder, content):
    """As does a torch from a zip file, without any loss to the job."""
    folder = make_folder()
    with zipfile.ZipFile(folder / "lib.zip", "w") as archive:
        archive.writestr("torch/__init__.py", "answer = 42")
    (folder / "bad").mkdir()
    (folder / "bad.json").write_text(content)
    environ = {"SUPERVISE_PROBE": str(folder / "bad.json")}
    launch(
        "import sys; sys.path[:0] = ['lib.zip']; import torch; print(torch.answer)",
        folder=folder,
        environ=environ,
    )
    assert (folder / "out").read_text() == "42\n"
    marks = [path.name.split(".")[0] for path in sorted((folder / "bad").iterdir())]
    assert marks == ["boot", "off"]


def test_the_last_words_of_a_job_are_recorded(launch):
    """An uncaught exception in one line, with its place; the job's own hook stays its own."""
    hook = "sys.excepthook = lambda *a: print('own hook')\n"
    job = launch(TRAIN + hook + "raise ValueError('bad data\\nmore')", environ=FAST_TORCH, code=1)
    assert job.segment().end() == (1, "ValueError: bad data (train.py:9)")
    assert (job.folder / "out").read_text() == "own hook\n" and len(job.frames) == 5


def test_a_job_that_leaves_no_words_still_leaves_its_frames(probed):
    job = probed.run(TRAIN + "import os; os._exit(9)", code=9)
    assert job.segment().end() is None and len(job.frames) == 5


REPORT = """
import supervise_probe
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.ones(2, 4)).sum().backward()
    if step >= 2:
        supervise_probe.report(val_loss=step, shard=torch.tensor(7.0), learning_rate=99.0,
                               tokens_per_update=5, name="text", flag=True)
    optimizer.step()
emit(sha="")
"""


def test_a_job_may_report_values_of_its_own(probed):
    """They join the next frame, under late names; what the probe measures stays as measured."""
    job = probed.run(REPORT, late=True)
    assert job.column("val_loss") == [None, None, 2.0, 3.0]
    assert job.column("shard")[2:] == [7.0, 7.0] and job.column("flag")[3] == 1.0
    assert job.column("tokens_per_update")[2:] == [5.0, 5.0] and job.frames[3]["tokens_seen"] == 10
    assert set(job.column("learning_rate")) == {0.1} and job.column("name") == [None] * 4
    assert job.segment().status()["tier"] == "T2"


WRONG = """
import supervise_probe

class Own(torch.Tensor):
    pass

class Odd:
    def item(self):
        raise RuntimeError("no such luck")

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
supervise_probe.report(early="before there is anybody to tell")
for step in range(8):
    model(torch.ones(2, 4)).sum().backward()
    supervise_probe.report(before=step)
    if step >= 2:
        supervise_probe.report(
            vector=torch.ones(3), meta=torch.ones(1, device="meta"), odd=Odd(), huge=10**400,
            array=torch.ones(3).numpy(), turning=torch.tensor(1j), bare=1j, text="two\\nlines",
            nothing=None, inner=step, wave=torch.tensor(2.0).numpy(),
            own=torch.ones(1).as_subclass(Own),
            **{"": 1.0, "two words": 1.0, "val/loss": 2.0, "x" * 200: 1.0},
        )
    supervise_probe.report(after=torch.tensor(float(step)), sparse=torch.ones(1).to_sparse())
    optimizer.step()
emit(sha="")
"""
LEFT_OUT = [
    *("'early' is no number: str", "'vector' is a tensor of 3 elements, not of one"),
    *("'meta' is a tensor without a real number: meta", "'odd' no such luck"),
    *("'huge' int too large to convert to float", "'array' can only convert an array of size 1"),
    *("'turning' is a tensor without a real number: cpu, torch.complex64", "'' is no name of a"),
    *("'bare' is no number: complex", "'text' is no number: str", "'two words' is no name of a"),
    f"'{'x' * 120}' is no name of a metric: longer than 120 bytes",
]


def test_what_is_no_number_is_left_out_alone_and_said_once(probed):
    """Each other value is taken, and nothing is switched off."""
    job = probed.run(WRONG, late=True)
    assert "collector-off" not in job.kinds() and "off" not in job.marks and job.err == ""
    assert job.column("before") == job.column("after") == [float(step) for step in range(8)]
    assert job.column("inner")[2:] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert job.column("wave")[7] == 2.0 == job.column("val/loss")[7]
    told = [notice.message for notice in job.notices if notice.kind == "report"]
    whole = " ".join(told)
    assert all(whole.count(text) == 1 for text in LEFT_OUT)
    assert "nothing" not in whole and "inner" not in whole and "val/loss" not in whole


def test_without_a_supervisor_the_functions_for_scripts_do_nothing():
    code = (
        "import supervise_probe; supervise_probe.report(x=1); supervise_probe.shard('a', 3)\n"
        "assert not supervise_probe.is_quarantined('a')\n"
        "print(supervise_probe.__all__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == ["is_quarantined", "report", "shard"]
