"""Identity of a run: its code, command, packages, inputs and machine, for the record of a run.

Collected once per launch on a thread beside the running job, so that no start waits for it. Each
part has a limit, and one that cannot be read is a sentence under `missing`: a repository or a
driver that hangs costs only its own part.

Packages are those in the directories from which a process of the job has loaded libraries, by the
names that pip gives their metadata. Nothing is started and nothing enters the job for them.

Sources: PEP 376 and PEP 427 (`NAME-VERSION.dist-info`); proc(5), `/proc/PID/maps`; NVML.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from .. import __version__
from ..store import files
from ..system import Thread
from . import host

MAX_FILES = 32  # of each sort; project default
MAX_BYTES = 64 << 20  # of one file; the largest tokenizers have 35 MB
ALL_BYTES = 128 << 20  # of all files of a launch; half a second of one core
LOADED_S = 120.0  # a first compiled step may take 77 s on a CPU (injection.md, field note 13)
DRIVER_S = 10.0
CODE_S = 20.0
MAX_DIFFERENCES = 32
# What tokenizers and lists of data are called: Transformers, SentencePiece, nanochat; Hugging
# Face datasets, MosaicML streaming, nanoGPT.
RECOGNISED = frozenset(
    (
        *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tokenizer.pkl"),
        *("special_tokens_map.json", "vocab.json", "vocab.txt", "merges.txt"),
        *("dataset_info.json", "dataset_infos.json", "manifest.json", "index.json", "meta.pkl"),
    )
)
CONFIGS = frozenset(
    (
        *(".py", ".sh", ".yaml", ".yml", ".json", ".toml", ".cfg", ".conf", ".ini", ".gin"),
        *(".jsonnet", ".libsonnet", ".slurm", ".sbatch"),
    )
)
FORMULAS = ("supervise/detectors", "supervise_probe/collectors")
SUPERVISOR = "the supervisor's Python"
JOB = "the job's process"
_PACKAGE = re.compile(r"([^-]+)-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info")
_LIBRARIES = re.compile(r"(/\S.*?/(?:site|dist)-packages)/")

Identity = Mapping[str, Any]


class IdentityCollector:
    """Collects the identity of each launch of one run.

    Args:
        argv: the job's command, without secrets.
        directory: its working directory.
        manifest: files that the policy names, `job.manifest`.
        nvml: returns the binding of the NVIDIA driver; raises ImportError without one.
    """

    def __init__(
        self,
        argv: Sequence[str],
        directory: Path,
        manifest: Sequence[str] = (),
        nvml: Callable[[], Any] | None = None,
    ) -> None:
        self._argv = list(argv)
        self._directory = directory
        self._manifest = list(manifest)
        self._nvml = nvml or _pynvml
        self._collection: _Collection | None = None
        self._first_code = threading.Event()
        self._code: dict[str, Any] = {}

    def start(self) -> None:
        """Collect what a launch consists of; the one before is left as it is."""
        collection = self._collection = _Collection()
        try:
            Thread(target=self._collect, args=(collection,), name="identity", daemon=True).start()
        except RuntimeError as error:  # at the limit of threads
            self._code_is_known({"missing": str(error)})
            collection.finish({"missing": f"not collected: {error}"})

    def loaded(self, pid: int) -> None:
        """A process of the job makes steps: its libraries are loaded. Safe to repeat."""
        if self._collection is not None:
            self._collection.load(pid)

    def ended(self, within_s: float) -> None:
        """The job has ended: wait so long for what is still being read."""
        if self._collection is not None:
            self._collection.load(None)
            self._collection.done.wait(within_s)

    def recall(self, found: Identity) -> None:
        """Another supervisor has collected the identity of the launch that goes on."""
        self._code_is_known({**found.get("code", {}), "files": found.get("files", {})})

    def poll(self) -> Identity | None:
        """Return the identity of the newest launch, once; None before it is known."""
        collection = self._collection
        if collection is None or not collection.done.is_set():
            return None
        self._collection = None
        return collection.result

    def code(self) -> dict[str, Any]:
        """Return the code and the named files of the first launch; waits for them. Any thread."""
        self._first_code.wait(CODE_S)
        return dict(self._code)

    def _code_is_known(self, found: Mapping[str, Any]) -> None:
        if not self._first_code.is_set():
            self._code = dict(found)
            self._first_code.set()

    def _collect(self, collection: _Collection) -> None:
        found: dict[str, Any] = {"command": self._argv}
        try:
            budget = ByteBudget()
            found["code"] = _guarded(lambda: code(self._directory, self._argv))
            found["files"] = _guarded(lambda: named_files(self._argv, self._directory, budget))
            self._code_is_known({**found["code"], "files": found["files"]})
            found["inputs"] = _guarded(
                lambda: input_files(self._argv, self._directory, self._manifest, budget)
            )
            found["hardware"] = _guarded(lambda: hardware(self._nvml))
            found["system"] = {"platform": platform.platform(), "host": platform.node()}
            found["supervise"] = _guarded(supervise)
            found["packages"] = _guarded(lambda: packages(*collection.process()))
        finally:
            self._code_is_known({"missing": "not collected"})
            collection.finish(found)


class _Collection:
    """One collection: the process that it asks about, and what it found."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.result: Identity = {}
        self._loaded = threading.Event()
        self._pid: int | None = None

    def load(self, pid: int | None) -> None:
        if not self._loaded.is_set():
            self._pid = pid
            self._loaded.set()

    def process(self) -> tuple[int | None, str]:
        """Wait for a process whose libraries are loaded; return None and why if there is none."""
        if not self._loaded.wait(LOADED_S):
            return None, f"the job made no step within {LOADED_S:g} s"
        return self._pid, "the job ended before it made a step"

    def finish(self, found: Identity) -> None:
        self.result = found
        self.done.set()


class ByteBudget:
    """How many bytes of files may still be hashed."""

    def __init__(self, left: int = ALL_BYTES) -> None:
        self.left = left

    def digest(self, path: Path) -> str:
        """Return "sha256:..." of a file, or why it was not hashed."""
        try:
            with os.fdopen(files.open_file(path, foreign=True), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > MAX_BYTES:
                    return f"not hashed: {size} bytes, more than {MAX_BYTES}"
                if size > self.left:
                    return f"not hashed: {size} bytes, beyond the limit of one launch"
                self.left -= size
                return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        except OSError as error:
            return f"not hashed: {error.strerror or error}"


def code(directory: Path, argv: Sequence[str]) -> dict[str, Any]:
    """Return the version of the job's code: of its working directory, else of its script."""
    found = host.git(directory)
    scripts = [path.parent for path in _paths(argv, directory) if path.suffix == ".py"]
    for place in scripts[:1]:
        if "missing" in found and place != directory:
            found = host.git(place)
    # Untracked files come and go with what the job writes.
    kept = ("commit", "branch", "diff_sha256", "missing")
    return {name: found[name] for name in kept if name in found}


def _paths(argv: Sequence[str], directory: Path) -> list[Path]:
    """Return the files and directories that a command names, also as `--option=PATH` and `-m`."""
    found: dict[Path, None] = {}
    for place, arg in enumerate(argv[1:], 1):
        names = [arg, arg.partition("=")[2]]
        if argv[place - 1] == "-m":
            names.append(f"{arg.replace('.', '/')}.py")
        for name in filter(None, names):
            with suppress(OSError, ValueError):  # too long for a path, or a NUL
                if (directory / name).exists():
                    found[directory / name] = None
    return list(found)


def _hashed(paths: Iterable[Path], directory: Path, budget: ByteBudget) -> dict[str, str]:
    return {
        str(path.relative_to(directory) if path.is_relative_to(directory) else path): digest
        for path in list(paths)[:MAX_FILES]
        for digest in (budget.digest(path),)
    }


def named_files(argv: Sequence[str], directory: Path, budget: ByteBudget) -> dict[str, str]:
    """Return the SHA-256 of each script and configuration file that the command names."""
    found = (path for path in _paths(argv, directory) if path.suffix in CONFIGS)
    return _hashed((path for path in found if path.is_file()), directory, budget)


def input_files(
    argv: Sequence[str], directory: Path, manifest: Sequence[str], budget: ByteBudget
) -> dict[str, str]:
    """Return the SHA-256 of the tokenizer and of lists of data.

    They are the files that the policy names, and those with a usual name (`RECOGNISED`) in the
    working directory, in its `data`, and in the directories that the command names.
    """
    named = [directory / name for name in manifest]
    places = [directory, directory / "data"]
    places += [path for path in _paths(argv, directory) if path.is_dir()][:MAX_FILES]
    known = [place / name for place in places for name in sorted(RECOGNISED)]
    return _hashed(
        dict.fromkeys([*named, *(path for path in known if path.is_file())]), directory, budget
    )


def packages(pid: int | None, why: str = "") -> dict[str, Any]:
    """Return the installed packages: of a process of the job, else of the supervisor, with why."""
    directories: list[str] = []
    source = JOB
    if pid is not None:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text("utf-8", "replace")
            directories = sorted(set(_LIBRARIES.findall(maps)))
            why = "the job's process has loaded no package from a library of its own"
        except OSError as error:
            why = f"the job's process cannot be read: {error.strerror}"
    if not directories:
        source = f"{SUPERVISOR}: {why}"
        directories = [path for path in sys.path if Path(path).is_dir()]
    versions = dict(sorted(pair for place in reversed(directories) for pair in _versions(place)))
    listed = "".join(f"{name}=={version}\n" for name, version in versions.items())
    return {
        "source": source,
        "directories": directories,
        "sha256": hashlib.sha256(listed.encode()).hexdigest(),
        "versions": versions,
    }


def _versions(directory: str) -> Iterator[tuple[str, str]]:
    with suppress(OSError):
        for path in Path(directory).iterdir():
            if (found := _PACKAGE.fullmatch(path.name)) is not None:
                yield re.sub(r"[-_.]+", "-", found[1]).lower(), found[2]


def hardware(nvml: Callable[[], Any]) -> dict[str, Any]:
    """Return CPU, memory in bytes, and the devices with their driver."""
    model = platform.machine()
    with suppress(OSError):
        info = Path("/proc/cpuinfo").read_text("utf-8", "replace")
        model = next(iter(re.findall(r"^model name\s*: (.+)$", info, re.MULTILINE)), model)
    return {
        "cpu": model,
        "cpus": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        **_within(DRIVER_S, lambda: _devices(nvml())),
    }


def _devices(nvml: Any) -> dict[str, Any]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return {"devices": [], "driver": None}
    devices = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        devices.append(
            {
                "name": _text(nvml.nvmlDeviceGetName(handle)),
                "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
                "memory_bytes": int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            }
        )
    return {"devices": devices, "driver": _text(nvml.nvmlSystemGetDriverVersion())}


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _pynvml() -> Any:
    import pynvml

    return pynvml


def _within(limit_s: float, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `read` does, or why it did not in time; its thread is left behind then."""
    found: dict[str, Any] = {}
    thread = Thread(target=lambda: found.update(_guarded(read)), daemon=True)
    thread.start()
    thread.join(limit_s)
    return {"missing": f"no answer within {limit_s:g} s"} if thread.is_alive() else found


def supervise() -> dict[str, Any]:
    """Return the version of this project, and a digest of the files that hold its formulas."""
    return {"version": __version__, "formulas_sha256": formulas_digest()}


def formulas_digest() -> str:
    """Return the SHA-256 over the sources of all detectors and collectors."""
    whole = hashlib.sha256()
    for name in FORMULAS:
        package, _, folder = name.partition("/")
        spec = importlib.util.find_spec(package)
        places = (spec.submodule_search_locations if spec is not None else None) or ()
        for path in sorted(path for place in places for path in Path(place, folder).glob("*.py")):
            whole.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def _guarded(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `read` does, or why it cannot: a broken part must not cost the others."""
    try:
        return read()
    except Exception as error:
        return {"missing": f"{type(error).__name__}: {error}"}


def differences(before: Identity, after: Identity) -> list[dict[str, Any]]:
    """Return `{"field", "before", "after"}` for each part that is known in both and differs."""
    found = []
    for part in before.keys() & after.keys():
        old, new = before[part], after[part]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            if "missing" in old or "missing" in new or old.get("source") != new.get("source"):
                continue
            old, new = dict(_leaves(old)), dict(_leaves(new))
            names = sorted(old.keys() | new.keys())
            found += [
                {"field": f"{part}.{name}", "before": old.get(name), "after": new.get(name)}
                for name in names
                if old.get(name) != new.get(name) and not _is_expected(part, name, old.get(name))
            ]
        elif old != new:
            found.append({"field": part, "before": old, "after": new})
    return sorted(found, key=lambda one: str(one["field"]))


def _is_expected(part: str, name: str, before: Any) -> bool:
    """Whether a difference is another one again, or a file that the job itself has written."""
    return (part, name) == ("packages", "sha256") or (part == "inputs" and before is None)


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def describe(found: Sequence[Mapping[str, Any]]) -> str:
    """Return differences as one sentence."""
    parts = [f"{d['field']} {_short(d['before'])} → {_short(d['after'])}" for d in found[:4]]
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return f"{'; '.join(parts)}{more}"


def _short(value: Any) -> str:
    if value is None:
        return "none"
    text = str(value).removeprefix("sha256:")
    return text[:12] if re.fullmatch(r"[0-9a-f]{40,64}", text) else text[:60]
