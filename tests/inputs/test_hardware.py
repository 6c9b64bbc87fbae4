"""The machine: real numbers of this one, and a stand-in for the driver of a device."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from supervise.runtime import Hardware
from tests.support.nvml import Driver
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow  # waits for looks and processes


def hardware(tmp_path, nvml=None, **options):
    return Hardware(lambda: [psutil.Process()], tmp_path, nvml, **options)


def test_the_host_tells_real_numbers_from_a_thread_that_ends(tmp_path):
    looked = hardware(tmp_path, every_s=0.01)
    looked.start()
    found = wait_until(lambda: looked.newest(os.getpid(), leads=True), "a look")
    assert looked.newest(os.getpid(), leads=False) == {}
    looked.close()

    assert 0 < found["host_mem_used"] < 100
    assert 0 < found["disk_free"] <= 100
    assert found["open_files"] >= 3


@pytest.fixture
def started():
    children = []

    def start(program, *argv):
        children.append(subprocess.Popen([sys.executable, "-c", program, *argv]))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()


def growths(looked, times):
    """Return what each of so many looks tells of the growth, as far as it does."""
    found = []
    for _ in range(times):
        looked.measure()
        time.sleep(0.03)
        found.append(looked.newest(0, leads=True).get("host_mem_growth"))
    return [told for told in found if told is not None]


def test_memory_that_grows_is_measured_once_the_job_makes_steps(tmp_path, started):
    piece = max(1 << 20, int(10 * psutil.virtual_memory().available / 7200 / 100))
    fills = f"kept.append(b'x' * {piece})"
    child = started(f"import time\nkept = []\nwhile True:\n    {fills}\n    time.sleep(0.01)")
    looked = Hardware(lambda: [psutil.Process(child.pid)], tmp_path)
    time.sleep(0.3)
    for _ in range(24):
        looked.measure()
        time.sleep(0.03)
    found = looked.newest(0, leads=True)  # no step until now: it may load a model
    assert "host_mem_growth" not in found and found["host_mem_used"] > 0
    assert max(growths(looked, 48)) > 2**30  # an hour of that is a lot
    looked.reset()  # as when the job is started again: a smaller one is no growth
    assert growths(looked, 1) == []


READS = """import mmap, sys, time
file = open(sys.argv[1], "rb")
data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
for at in range(0, len(data), 1 << 19):
    sum(data[at : at + (1 << 19) : 4096])
    time.sleep(0.01)
time.sleep(60)
"""


def test_pages_of_a_mapped_file_are_no_memory_of_the_job(tmp_path, started):
    data = tmp_path / "tokens.bin"
    data.write_bytes(bytes(1 << 27))
    child = psutil.Process(started(READS, str(data)).pid)
    looked = Hardware(lambda: [child], tmp_path)
    looked.newest(0, leads=True)
    found, before = [], child.memory_info().rss

    def has_read():
        found.extend(growths(looked, 1))
        return child.memory_info().rss >= before + (1 << 26)

    wait_until(has_read, "64 MB of the file")
    assert found and max(found) < 1e9


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count")
def test_a_job_that_shares_its_cpu_with_others_waits_for_it(tmp_path, started):
    spin = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
    job, *_ = [started(spin) for _ in range(3)]
    looked = Hardware(lambda: [psutil.Process(job.pid)], tmp_path)

    def share():
        looked.measure()
        found = looked.newest(0, leads=True).get("host_cpu_wait", 0.0)
        return found if found >= 25.0 else None

    assert wait_until(share, "a wait for the CPU", every_s=0.5) <= 100.0
    assert looked.troubles() == []


@pytest.mark.parametrize(
    ("users", "share", "temperatures"),
    [
        ({0: ["own"], 1: ["own"]}, 0.9, (61.0, 61.0)),
        ({0: [os.getppid()], 1: ["own"]}, 0.3, (61.0, 61.0)),
        ({0: [2**22 + 9], 1: [2**22 + 10]}, 0.9, (61.0, None)),
        ({0: [os.getppid()]}, 0.0, (None, None)),
    ],
)
def test_the_devices_of_a_job_are_those_it_uses_and_in_a_container_all(
    tmp_path, users, share, temperatures
):
    own = {n: [os.getpid() if pid == "own" else pid for pid in pids] for n, pids in users.items()}
    looked = hardware(tmp_path, Driver(own))
    looked.measure()

    assert looked.device_share == share
    of_ranks = [looked.newest(os.getpid(), leads=leads) for leads in (True, False)]
    assert tuple(values.get("gpu_temperature") for values in of_ranks) == temperatures


def test_a_rank_gets_the_worst_of_its_devices_and_their_critical_errors(tmp_path):
    own = [os.getpid()]
    looked = hardware(tmp_path, driver := Driver({0: own, 1: own}))
    looked.measure()
    worst = {"gpu_util": 30.0, "gpu_mem_used": 40.0, "gpu_temperature": 61.0, "gpu_power": 350.0}
    assert looked.newest(os.getpid(), leads=False) == {**worst, "gpu_xid_errors": 0.0}
    driver.xids = 2
    looked.measure()

    assert looked.newest(os.getpid(), leads=False)["gpu_xid_errors"] == 2.0


def test_a_lost_device_is_not_taken_for_a_busy_one_and_hides_no_other(tmp_path):
    own = [os.getpid()]
    looked = hardware(tmp_path, driver := Driver({0: own, 1: own}, shared=True), answer_s=0.0)
    shares = []
    for driver.lost in (set(), {0}, {0}, {0, 1}, {0, 1}, {0, 1}):
        looked.measure()
        shares.append(looked.device_share)
        if driver.lost == {0}:
            assert looked.newest(os.getpid(), leads=False)["gpu_util"] == 30.0
    assert shares == [0.9, 0.3, 0.3, 0.0, 0.0, 0.0]
    assert looked.troubles() == [
        f"device {number} cannot be measured: NVMLError: GPU is lost" for number in (0, 1)
    ]

    driver.lost = set()
    looked.reset()
    looked.measure()
    assert (looked.device_share, looked.troubles()) == (0.9, [])


def test_a_device_that_fails_for_a_moment_is_as_busy_as_before_and_asked_again(tmp_path):
    own = [os.getpid()]
    looked = hardware(tmp_path, driver := Driver({0: own}, count=1))

    def share(lost):
        driver.lost = lost
        looked.measure()
        return looked.device_share

    assert [share(lost) for lost in (set(), {0}, {0}, {0})] == [0.9] * 4

    looked = hardware(tmp_path, driver, answer_s=0.5)
    assert [share(lost) for lost in (set(), {0}, {0})] == [0.9] * 3
    wait_until(lambda: share({0}) == 0.0, "the end of what it told last")
    wait_until(lambda: share(set()) == 0.9, "an answer")
    assert [share({0}) for _ in range(3)] == [0.9] * 3
    assert len(looked.troubles()) == 1


def test_a_subject_that_keeps_failing_is_given_up_and_said_but_a_missing_driver_is_no_fault(
    tmp_path,
):
    looked = hardware(tmp_path / "gone", Driver(count=0))
    for _ in range(5):
        looked.measure()
    (told,) = looked.troubles()

    assert looked.troubles() == []
    assert told.startswith("disk cannot be measured: FileNotFoundError")
    found = looked.newest(os.getpid(), leads=True)
    assert "host_mem_used" in found and "gpu_util" not in found


def test_the_fullest_disk_of_a_run_counts(tmp_path):
    """The job may write elsewhere than its checkpoints, and the record lies on a third disk."""
    empty, used = Path("/proc"), 100.0 - psutil.disk_usage(str(tmp_path)).percent
    alone = Hardware(list, empty)
    looked = Hardware(list, empty, disks=lambda: (tmp_path, tmp_path / "gone"))
    alone.measure()
    looked.measure()

    assert alone.newest(0, leads=True)["disk_free"] == 100.0
    assert looked.newest(0, leads=True)["disk_free"] == pytest.approx(used, abs=5.0)
    assert used < 100.0
