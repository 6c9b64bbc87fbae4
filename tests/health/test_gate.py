"""What is asked of a host, with stand-ins for its driver, its cgroup and the job's Python."""

import json
import time
from types import SimpleNamespace

import pytest

from supervise.core.model import HostHealth
from supervise.runtime import HealthGate, Start, available_bytes, driver_report, memory_bytes
from tests.support.nvml import Driver

GB = 10**9


def test_what_the_driver_has_of_each_device_is_reported():
    """What it does not support is no fault; without a driver there is no device."""
    well, counted, lost = driver_report(Driver(count=3))

    sound = {"ecc_errors": 0, "remap_pending": False, "remap_failed": False}
    assert well == {"device": "device 0", "name": "NVIDIA H100"} | sound
    assert (counted["ecc_errors"], counted["remap_pending"]) == (4, True)
    assert lost == {"device": "device 2", "lost": "it does not answer: GPU is lost"}
    assert driver_report(Driver(count=0)) == []
    assert driver_report(Driver(count=1, shared=True)) == [well]


@pytest.mark.parametrize(
    ("files", "allowed"),
    [
        ({"max": "5000", "current": "3000", "stat": "anon 7\ninactive_file 400\n"}, 2400),
        ({"max": "max", "current": "3000", "stat": "inactive_file 400\n"}, None),
        (
            {"limit_in_bytes": "5000", "usage_in_bytes": "3000"}
            | {"stat": "inactive_file 1\ntotal_inactive_file 400\n"},
            2400,
        ),
        ({}, None),
    ],
)
def test_memory_is_what_the_container_allows(tmp_path, files, allowed):
    """Files that nobody uses are given up; without a limit the machine counts."""
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)

    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "memory.max").write_text("max")
    found, most = available_bytes(tmp_path / "inner"), memory_bytes(tmp_path / "inner")
    assert found == allowed if allowed is not None else found > 10**6
    assert most == 5000 if allowed is not None else most > 10**6


@pytest.fixture
def python(tmp_path):
    """Return a function: a job's Python that answers a request to multiply with this text."""

    def make(text, code=0):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
        path.chmod(0o755)
        return str(path)

    return make


def look(start, wanted, machine=None, within_s=60.0, *, alive=False, **options):
    gate = HealthGate(lambda: wanted, {}, lambda: machine, lambda: (), **options)
    found = gate.check_host(start, within_s, alive=alive)
    return {each.check: (each.verdict, each.text) for each in found}


ROW = {"device": "cpu", "products": 9, "wrong": 0, "no_memory": False, "in_use": False, "error": ""}
ROW |= {"free": 0, "total": 0}


def test_a_host_that_is_fit(tmp_path, python):
    answer = python("a warning\n" + json.dumps({"torch": "2", "devices": [ROW]}))
    machine = SimpleNamespace(peak_bytes=10**6, device_count=None)
    found = look(Start(tmp_path, 10, answer), HostHealth(matmul=5.0), machine)

    assert {check: verdict for check, (verdict, _) in found.items()} == {
        "memory": "good",
        "disk": "good",
        "devices": "skipped",
        "matmul": "good",
    }
    assert found["matmul"][1] == "9 products on cpu are right, in 5 s"


@pytest.mark.parametrize(
    ("answer", "code", "text"),
    [
        ('{"error": "torch cannot be imported: x"}', 3, "torch cannot be imported: x"),
        ("no JSON", 7, "it ended with code 7"),
    ],
)
def test_an_answer_that_is_none_decides_nothing(tmp_path, python, answer, code, text):
    found = look(Start(tmp_path, 10, python(answer, code)), HostHealth(matmul=5.0))
    assert found["matmul"] == ("undecided", text)


@pytest.mark.parametrize(
    ("python", "wanted", "matmul"),
    [
        (None, HostHealth(matmul=5.0), ("undecided", "the job's Python is not known")),
        (None, None, ("skipped", "no device; job.health.matmul asks the CPU")),
        (None, HostHealth(matmul=0.0), ("skipped", "job.health.matmul is 0")),
        ("/no/python", HostHealth(matmul=5.0), ("undecided", "/no/python cannot be started")),
    ],
)
def test_nothing_is_multiplied(tmp_path, python, wanted, matmul):
    verdict, text = look(Start(tmp_path, python=python), wanted)["matmul"]
    assert (verdict, text[: len(matmul[1])]) == matmul


def test_time_that_is_over_decides_nothing(tmp_path):
    began = time.monotonic()
    machine = SimpleNamespace(peak_bytes=None, device_count=8)
    wanted = HostHealth(matmul=5.0, memory_gb=1e6)
    found = look(Start(tmp_path, 0, "/bin/sh"), wanted, machine, within_s=0.0)

    assert found["devices"] == ("undecided", "there was no time left to ask")
    assert found["memory"][0] == "bad" and "matmul" not in found
    assert time.monotonic() - began < 4.0


@pytest.mark.slow
def test_memory_that_the_kernel_frees_after_a_moment_counts(tmp_path):
    sizes = [GB, GB, 5 * GB]
    wanted = HostHealth(memory_gb=4.0)
    found = look(Start(tmp_path), wanted, available=lambda: sizes.pop(0))

    assert found["memory"] == ("good", "5.0 GB available, and job.health.memory_gb is 4")


def test_a_job_that_runs_is_not_disturbed_and_a_policy_may_want_no_look(tmp_path):
    assert set(look(Start(tmp_path), HostHealth(matmul=5.0), alive=True)) == {"disk", "devices"}
    assert look(Start(tmp_path), "none") == {}
