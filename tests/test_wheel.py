"""What is published works by itself: built from the sdist, run where there is no source."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.supervised_run import interpreters

ROOT = Path(__file__).parents[1]
SHIPPED = {
    "supervisor/supervise": "supervise",
    "probes/supervise_probe": "supervise_probe",
    "probes/supervise_offline": "supervise_offline",
    "policies": "supervise/_shipped/policies",
    "runbooks": "supervise/_shipped/runbooks",
    "examples": "supervise/_shipped/examples",
    "docs": "supervise/_shipped/docs",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The sdist, and the wheel built from what is in it."""
    out = tmp_path_factory.mktemp("dist")
    source = out / "source"  # a copy: a build may not write into the tree that it is tested on
    shutil.copytree(
        ROOT,
        source,
        ignore=shutil.ignore_patterns(".venv", ".git", ".*_cache", ".soak", "runs", "__pycache__"),
    )
    litter = source / "examples" / "nano" / "__pycache__"  # what a run in the tree leaves behind
    litter.mkdir()
    (litter / "train.cpython-311.pyc").write_bytes(b"")
    command = ["-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    run(command, cwd=out)
    return out


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory):
    target = tmp_path_factory.mktemp("target")
    (wheel,) = dist.glob("*.whl")
    pip = ["-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    run([*pip, "--quiet", "--disable-pip-version-check"], cwd=dist)
    return target


def run(
    args: list[str], *, cwd: Path, path: Path | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SUPERVISE"))}
    if path:  # -S reads no .pth file, so an editable installation of the source is not there
        env |= {"PYTHONPATH": os.pathsep.join([str(path), sysconfig.get_path("purelib")])}
        args = ["-S", "-P", *args]
    done = subprocess.run(
        [sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=180
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def files(folder: str) -> set[str]:
    """Return every file below a folder of the tree, caches aside."""
    found = (ROOT / folder).rglob("*")
    return {
        path.relative_to(ROOT / folder).as_posix()
        for path in found
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_every_file_and_no_litter(dist):
    (wheel,) = dist.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    assert names == {f"{to}/{name}" for tree, to in SHIPPED.items() for name in files(tree)}
    assert any(n.endswith("licenses/LICENSE") for n in zipfile.ZipFile(wheel).namelist())


def test_its_metadata_says_whose_it_is_and_what_it_installs(dist):
    """The version is that of the code; each package installed beside it has its licence listed."""
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            Path(name).name: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name and name.endswith(("METADATA", "entry_points.txt"))
        }
    fields = email.message_from_string(texts["METADATA"])
    listed = re.findall(r"^\| ([\w-]+) \|", (ROOT / "THIRD_PARTY.md").read_text(), re.MULTILINE)
    required = {
        re.split(r"[^\w-]", line)[0]
        for line in fields.get_all("Requires-Dist", [])
        if "extra" not in line or re.search(r"'(torch|backtest|data|sign|web)'", line)
    }

    source = (ROOT / "supervisor/supervise/__init__.py").read_text()
    assert f'__version__ = "{fields["Version"]}"' in source
    assert fields["Author"] == "The supervise authors"
    assert fields.get_all("License-File") == ["LICENSE", "THIRD_PARTY.md"]
    assert any(line.endswith(":: 3.13") for line in fields.get_all("Classifier", []))
    assert {name.lower() for name in required} <= {name.lower() for name in listed}
    assert re.findall(r"^(\S+) = supervise.cli:main", texts["entry_points.txt"], re.MULTILINE) == [
        "supervise",
        "supervise-train",
    ]


def test_the_sdist_can_be_built_and_tested(dist):
    """The wheel came out of it, so the code is there; so are the tests and what they read."""
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "CHANGELOG.md"} <= names
    assert {f"tests/{name}" for name in files("tests")} <= names


def test_it_runs_without_the_source_and_finds_what_ships_beside_it(installed, tmp_path):
    version = run(["-m", "supervise", "--version"], cwd=tmp_path, path=installed)
    script = """
import supervise, supervise_probe
from supervise.catalog import shipped_folder
from supervise.runtime.environment import inject_dir
for folder in map(shipped_folder, ("policies", "policies/packs", "runbooks", "examples")):
    print(folder, len(list(folder.rglob("*.yaml"))))
print(shipped_folder("examples") / "nano" / "train.py")
print(inject_dir() / "sitecustomize.py")
print(supervise.__file__, supervise_probe.__file__, sep="\\n")
"""
    lines = run(["-c", script], cwd=tmp_path, path=installed).stdout.splitlines()
    counts = [int(line.split()[1]) for line in lines[:4]]

    assert version.stdout.startswith("supervise, version ")
    assert all(line.startswith(str(installed)) for line in lines)
    assert all(count > 0 for count in counts[:3])
    assert all(Path(line).is_file() for line in lines[4:])


def test_a_job_runs_under_it(installed, tmp_path):
    job = "import os, sys; print('hello from the job'); sys.exit(3)"
    args = ["-m", "supervise", "--run-dir", "run", "--", sys.executable, "-c", job]
    done = run(args, cwd=tmp_path, path=installed, check=False)

    assert done.returncode == 3, done.stderr
    assert done.stdout == "hello from the job\n"
    assert (tmp_path / "run" / "audit.log").is_file()


NO_INDEX = re.compile(r"Failed to establish|Name or service|No route|ProxyError|Retrying")
KEPT = (".local/state/supervise/", "runs/")  # docs/commands.md


@pytest.mark.chaos  # installs all that it needs
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_a_fresh_environment_gets_it_and_loses_it_again(dist, tmp_path, version):
    """Wheel and sdist work with what they name, and leave only what docs/commands.md lists."""
    if version not in interpreters():
        pytest.skip(f"no Python {version} here: CONTRIBUTING.md says how to get one")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SUPERVISE", "XDG"))}
    cache = env.get("PIP_CACHE_DIR") or Path.home() / ".cache" / "pip"
    home, shm, program = tmp_path / "home", tmp_path / "shm", tmp_path / "env" / "bin"
    env |= {"HOME": str(home), "SUPERVISE_SHM": str(shm), "PIP_CACHE_DIR": str(cache)}
    for folder in (home, shm):
        folder.mkdir()

    def call(name: str, *argv: object, code: int = 0) -> str:
        command = [name if "/" in name else str(program / name), *map(str, argv)]
        strict = {"PYTHONWARNINGS": "error"} if name.startswith("supervise") else {}
        done = subprocess.run(
            command, cwd=home, env=env | strict, capture_output=True, text=True, timeout=300
        )
        if name == "pip" and done.returncode and NO_INDEX.search(done.stderr):
            pytest.skip("no package index can be reached from here")
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    call(interpreters()[version], "-m", "venv", tmp_path / "env")
    (site,) = (tmp_path / "env").glob("lib/python3.*/site-packages")
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    call("pip", "install", "--quiet", wheel)
    call("pip", "install", "--quiet", "--no-deps", "--force-reinstall", sdist)
    before = {*home.rglob("*")}  # pip builds in its own way

    assert call("supervise-train", "--version").startswith("supervise, version ")
    assert f"on Python {version}." in call("supervise", "doctor")
    call("supervise", "--policy", "nano", "--", "sh", "-c", "exit 3", code=3)
    for command in ("status", "replay", "audit verify", "record write", "runs --json"):
        call("supervise", *command.split())

    call("pip", "uninstall", "--yes", "supervise-train")
    left = [path for folder in (site, program) for path in folder.rglob("*supervise*")]
    kept = [path for path in home.rglob("*") if not path.is_dir() and path not in before]
    assert not left
    assert kept
    assert not [p for p in kept if not p.relative_to(home).as_posix().startswith(KEPT)]
    assert not list(shm.iterdir())
