"""The machine: real numbers of this one, and a complete stand-in for the driver of a device."""

# ruff: noqa: N802, N815 - the driver's own names

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from supervise.inputs.hardware import ELSEWHERE, MEMORY_LOOKS, Hardware, slope


class Driver:
    """Two devices; this process computes on the first."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, users=None, count=2):
        self.users = users or {0: [os.getpid()], 1: [os.getpid()]}
        self.count = count
        self.xids = 0
        self.util = [90, 30]

    def nvmlInit(self):
        if self.count == 0:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlDeviceGetHandleByIndex(self, i):
        return i

    def nvmlDeviceGetComputeRunningProcesses(self, i):
        return [SimpleNamespace(pid=pid) for pid in self.users.get(i, [])]

    def nvmlDeviceGetMemoryInfo(self, i):
        return SimpleNamespace(used=(i + 1) * 20, total=100)

    def nvmlDeviceGetUtilizationRates(self, i):
        return SimpleNamespace(gpu=self.util[i])

    def nvmlDeviceGetTemperature(self, i, kind):
        return 60 + i

    def nvmlDeviceGetPowerUsage(self, i):
        return 350_000

    def nvmlDeviceGetTotalEccErrors(self, i, kind, counter):
        raise self.NVMLError("Not Supported")

    def nvmlEventSetCreate(self):
        return "set"

    def nvmlDeviceRegisterEvents(self, device, kinds, events):
        pass

    def nvmlEventSetWait_v2(self, events, timeout_ms):
        if self.xids == 0:
            raise self.NVMLError("Timeout")
        self.xids -= 1


def hardware(tmp_path, nvml=None, **options):
    return Hardware(lambda: [psutil.Process()], tmp_path, nvml, **options)


def test_the_host_tells_real_numbers(tmp_path):
    looked = hardware(tmp_path)
    looked.look()

    found = looked.newest(os.getpid(), leads=True)

    assert 0 < found["host_mem_used"] < 100
    assert 0 < found["disk_free"] <= 100
    assert found["open_files"] >= 3
    assert looked.newest(os.getpid(), leads=False) == {}


def test_memory_that_grows_is_measured(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", "import time\nkept = []\nwhile True:\n"
         "    kept.append(b'x' * 2**20)\n    time.sleep(0.002)"]
    )  # fmt: skip
    try:
        looked = Hardware(lambda: [psutil.Process(child.pid)], tmp_path)
        time.sleep(0.3)
        for _ in range(MEMORY_LOOKS):
            looked.look()
            time.sleep(0.004)
        assert looked.newest(0, leads=True)["host_mem_growth"] > 2**30  # an hour of that is a lot
        looked.begin_anew()  # as when the job is started again: a smaller one is no growth
        looked.look()
        assert "host_mem_growth" not in looked.newest(0, leads=True)
    finally:
        child.kill()
        child.wait()


def test_a_rank_gets_the_worst_of_its_devices(tmp_path):
    looked = hardware(tmp_path, Driver())
    looked.look()

    found = looked.newest(os.getpid(), leads=False)

    assert found == {
        "gpu_util": 30.0,
        "gpu_mem_used": 40.0,
        "gpu_temperature": 61.0,
        "gpu_power": 350.0,
        "gpu_xid_errors": 0.0,
    }


def test_devices_of_other_jobs_are_none_of_ours(tmp_path):
    looked = hardware(tmp_path, Driver({0: [os.getppid()], 1: [os.getpid()]}))
    looked.look()

    assert looked.newest(os.getpid(), leads=True)["gpu_temperature"] == 61.0


def test_in_a_container_the_leader_answers_for_all_devices(tmp_path):
    looked = hardware(tmp_path, Driver({0: [2**22 + 9], 1: [2**22 + 10]}))
    looked.look()

    assert ELSEWHERE in looked._of_pid
    assert looked.newest(os.getpid(), leads=True)["gpu_util"] == 30.0
    assert "gpu_util" not in looked.newest(os.getpid(), leads=False)


def test_critical_errors_are_counted(tmp_path):
    driver = Driver()
    looked = hardware(tmp_path, driver)
    looked.look()
    driver.xids = 2
    looked.look()

    assert looked.newest(os.getpid(), leads=False)["gpu_xid_errors"] == 2.0


def test_a_machine_without_a_driver_is_no_fault(tmp_path):
    looked = hardware(tmp_path, Driver(count=0))
    for _ in range(3):
        looked.look()

    assert looked.troubles() == []
    assert "gpu_util" not in looked.newest(os.getpid(), leads=True)


def test_a_subject_that_keeps_failing_is_given_up_and_said(tmp_path):
    looked = hardware(tmp_path / "gone")
    for _ in range(5):
        looked.look()
    told = looked.troubles()

    assert len(told) == 1
    assert looked.troubles() == []
    assert told[0].startswith("disk cannot be measured: FileNotFoundError")
    assert "host_mem_used" in looked.newest(0, leads=True)


def test_the_thread_looks_by_itself_and_ends(tmp_path):
    looked = hardware(tmp_path, every_s=0.01)
    looked.start()
    end = time.monotonic() + 10
    while not looked.newest(0, leads=True) and time.monotonic() < end:
        time.sleep(0.01)
    found = looked.newest(0, leads=True)
    looked.close()

    assert found["host_mem_used"] > 0
    assert not looked._thread.is_alive()


@pytest.mark.parametrize(("points", "expected"), [
    ([], None), ([(1, 1)], None), ([(1, 1), (1, 5)], None), ([(0, 1), (1, 3), (2, 5)], 2.0),
])  # fmt: skip
def test_the_slope_is_that_of_least_squares(points, expected):
    assert slope(points) == expected
