"""What a launch consists of, and what differs from the one before."""

import hashlib
import os
import subprocess
import sys
import threading

import msgspec
import pytest
from msgspec.structs import replace

from supervise.runtime import Identity, IdentityCollector, compare_identities, describe_differences
from tests.support.nvml import Driver


def no_driver():
    raise ImportError("No module named 'pynvml'")


@pytest.fixture
def collect(tmp_path):
    """A function that collects the identity of a command in `tmp_path`, as of a job that ended."""

    def run(*argv, manifest=(), nvml=no_driver, pid=None):
        collector = IdentityCollector(["python", *argv], tmp_path, manifest, nvml, driver_s=0.5)
        collector.start()
        if pid is not None:
            collector.on_first_step(pid)
        collector.finish_reading(30.0)
        found = collector.poll()
        assert found is not None and collector.poll() is None
        assert collector.code() == replace(found.code, files=found.files)
        return found

    return run


def sha(text):
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def test_files_of_the_command_and_inputs_are_hashed(collect, tmp_path):
    (tmp_path / "model").mkdir()
    for name in ("train.py", "a.yaml", "model/tokenizer.json", "shards.txt", "log.txt"):
        (tmp_path / name).write_text(name)

    argv = "train.py --config=a.yaml --lr 1e-3 --model model --log log.txt"
    found = collect(*argv.split(), manifest=["shards.txt", "absent.txt"])

    assert found.files == {"train.py": sha("train.py"), "a.yaml": sha("a.yaml")}
    assert found.inputs == {
        "shards.txt": sha("shards.txt"),
        "absent.txt": "not hashed: No such file or directory",
        "model/tokenizer.json": sha("model/tokenizer.json"),
    }
    assert "not a git repository" in found.code.missing
    assert found.hardware.cpus == os.cpu_count()
    assert "pynvml" in found.hardware.missing


def test_hashing_has_a_limit_for_a_file_and_for_all(collect, tmp_path):
    names = [f"{number}.yaml" for number in range(4)]
    for name in names:
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, (64 << 20) + (name == "0.yaml"))

    found = collect(*names).files

    assert found["0.yaml"] == "not hashed: 67108865 bytes, more than 67108864"
    assert [found[name][:4] for name in names[1:3]] == ["sha2"] * 2
    assert found["3.yaml"].startswith("not hashed: 67108864 bytes, beyond")


def test_packages_are_those_of_the_directories_that_the_job_loads_from(collect, tmp_path):
    library = tmp_path / "site-packages" / "fast" / "core.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(bytes(4096))
    (tmp_path / "site-packages" / "Fast_Core-1.2.dist-info").mkdir()
    code = "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1)"
    code += "; print(flush=True); input()"
    pipe = subprocess.PIPE
    argv = [sys.executable, "-c", code, library]
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe) as job:
        job.stdout.readline()
        own = collect(pid=job.pid).packages
        job.communicate(b"\n")
    assert (own.source, own.versions) == ("the job's process", {"fast-core": "1.2"})
    assert own.sha256 == hashlib.sha256(b"fast-core==1.2\n").hexdigest()

    ours = collect("-c", "pass").packages
    assert ours.source == "the supervisor's Python: the job ended before it made a step"
    assert ours.versions["psutil"]


def test_devices_are_named_and_a_driver_that_hangs_costs_only_itself(collect):
    found = collect(nvml=lambda: Driver(count=1)).hardware
    (device,) = found.devices
    assert (device.name, device.uuid, device.memory_bytes) == ("NVIDIA H100", "GPU-0", 100)
    assert found.driver == "570.1"
    shared = collect(nvml=lambda: Driver(count=1, shared=True)).hardware
    assert shared.devices == [replace(device, memory_bytes=None)]

    release = threading.Event()
    found = collect(nvml=release.wait)
    release.set()
    assert found.hardware.missing == "no answer within 0.5 s"
    assert found.packages.versions


def test_what_differs_is_named_field_by_field():
    """A part that is unknown on one side, and a tokenizer that the job saved, are no difference."""
    versions = {"torch": "2.13.0", "numpy": "1"}
    before = {
        "command": ["python", "train.py"],
        "code": {"commit": "a" * 40},
        "files": {"train.py": "sha256:1"},
        "inputs": {"tokenizer.json": "sha256:1"},
        "packages": {"source": "x", "sha256": "1", "versions": versions},
        "hardware": {"missing": "no answer"},
    }
    after = before | {
        "code": {"commit": "b" * 40},
        "files": {"train.py": "sha256:2"},
        "inputs": {"tokenizer.json": "sha256:1", "out/tokenizer.json": "sha256:1"},
        "packages": {"source": "x", "sha256": "2", "versions": {**versions, "torch": "2.12.0"}},
        "hardware": {"cpus": 2},
    }

    found = compare_identities(*[msgspec.convert(part, Identity) for part in (before, after)])

    assert [change.field for change in found] == [
        *("code.commit", "files.train.py", "packages.versions.torch")
    ]
    assert describe_differences(found) == (
        "code.commit aaaaaaaaaaaa → bbbbbbbbbbbb; files.train.py 1 → 2; "
        "packages.versions.torch 2.13.0 → 2.12.0"
    )
    same = msgspec.convert(before, Identity)
    assert compare_identities(same, same) == []
