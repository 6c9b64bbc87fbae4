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
from typing import Any, TypeVar

import msgspec
import psutil
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from .. import __version__
from ..store import files
from ..system import Thread
from . import host
from .host import CodeVersion

MAX_FILES = 32  # of each sort; project default
MAX_BYTES = 64 << 20  # of one file; the largest tokenizers have 35 MB
ALL_BYTES = 128 << 20  # of all files of a launch; half a second of one core
LOADED_S = 120.0  # a first compiled step may take 77 s on a CPU, measured
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

Digests = Mapping[str, str]  # path -> "sha256:..." or a sentence; or one sentence under `missing`


class Part(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of an identity; `missing` is the reason why it, or the rest of it, is not known."""

    missing: str | UnsetType = UNSET


class Packages(Part, frozen=True, kw_only=True):
    """The installed packages; `sha256` is of the list of names and versions."""

    source: str | UnsetType = UNSET
    directories: list[str] | UnsetType = UNSET
    sha256: str | UnsetType = UNSET
    versions: dict[str, str] | UnsetType = UNSET


class Device(Struct, frozen=True):
    """One device of the NVIDIA driver."""

    name: str
    uuid: str
    memory_bytes: int | None  # None: the host's


class Hardware(Part, frozen=True, kw_only=True):
    """CPU, memory in bytes, and the devices with their driver."""

    cpu: str | UnsetType = UNSET
    cpus: int | UnsetType | None = UNSET
    memory_bytes: int | UnsetType = UNSET
    devices: list[Device] | UnsetType = UNSET
    driver: str | UnsetType | None = UNSET


class Platform(Struct, frozen=True):
    """The operating system and the name of the host."""

    platform: str
    host: str


class Supervisor(Part, frozen=True, kw_only=True):
    """The version of this project, and a digest of the files that hold its formulas."""

    version: str | UnsetType = UNSET
    formulas_sha256: str | UnsetType = UNSET


class Identity(Part, frozen=True, kw_only=True):
    """Everything that one launch consists of."""

    command: list[str] | UnsetType = UNSET
    code: CodeVersion | UnsetType = UNSET
    files: Digests | UnsetType = UNSET
    inputs: Digests | UnsetType = UNSET
    hardware: Hardware | UnsetType = UNSET
    system: Platform | UnsetType = UNSET
    supervise: Supervisor | UnsetType = UNSET
    packages: Packages | UnsetType = UNSET


class RecordedIdentity(Struct, frozen=True):
    """The identity of the newest launch in `identity.json` and in the audit log."""

    run: str
    attempt: int
    identity: Identity


P = TypeVar("P", CodeVersion, Hardware, Packages, Supervisor)
Leaf = str | int | float | bool | list[str] | None


class Difference(Struct, frozen=True):
    """A field that two launches have with different values."""

    field: str
    before: Leaf
    after: Leaf


class IdentityCollector:
    """Collects the identity of each launch of one run.

    Args:
        argv: the job's command, without secrets.
        directory: its working directory.
        manifest: files that the policy names, `job.manifest`.
        nvml: returns the binding of the NVIDIA driver; raises ImportError without one.
        driver_s: how long the driver is waited for.
    """

    def __init__(
        self,
        argv: Sequence[str],
        directory: Path,
        manifest: Sequence[str] = (),
        nvml: Callable[[], Any] | None = None,
        driver_s: float = DRIVER_S,
    ) -> None:
        self._driver_s = driver_s
        self._argv = list(argv)
        self._directory = directory
        self._manifest = list(manifest)
        self._nvml = nvml or _pynvml
        self._collection: _Collection | None = None
        self._first_code = threading.Event()
        self._code = CodeVersion()

    def start(self) -> None:
        """Collect what a launch consists of; the one before is left as it is."""
        collection = self._collection = _Collection()
        try:
            Thread(target=self._collect, args=(collection,), name="identity", daemon=True).start()
        except RuntimeError as error:  # at the limit of threads
            self._code_is_known(CodeVersion(missing=str(error)))
            collection.finish(Identity(missing=f"not collected: {error}"))

    def on_first_step(self, pid: int) -> None:
        """A process of the job makes steps: its libraries are loaded. Safe to repeat."""
        if self._collection is not None:
            self._collection.load(pid)

    def finish_reading(self, within_s: float) -> None:
        """The job has ended: wait so long for what is still being read."""
        if self._collection is not None:
            self._collection.load(None)
            self._collection.done.wait(within_s)

    def recall(self, identity: Identity) -> None:
        """Another supervisor has collected the identity of the launch that goes on."""
        code = identity.code or CodeVersion()
        self._code_is_known(replace(code, files=identity.files or {}))

    def poll(self) -> Identity | None:
        """Return the identity of the newest launch, once; None before it is known."""
        collection = self._collection
        if collection is None or not collection.done.is_set():
            return None
        self._collection = None
        return collection.result

    def code(self) -> CodeVersion:
        """Return the code and the named files of the first launch; waits for them. Any thread."""
        self._first_code.wait(CODE_S)
        return self._code

    def _code_is_known(self, code: CodeVersion) -> None:
        if not self._first_code.is_set():
            self._code = code
            self._first_code.set()

    def _collect(self, collection: _Collection) -> None:
        identity = Identity(command=self._argv)
        try:
            budget = ByteBudget()
            version = _guarded(lambda: code_version(self._directory, self._argv), CodeVersion)
            files = _guarded_digests(lambda: named_files(self._argv, self._directory, budget))
            self._code_is_known(replace(version, files=files))
            identity = replace(
                identity,
                code=version,
                files=files,
                inputs=_guarded_digests(
                    lambda: input_files(self._argv, self._directory, self._manifest, budget)
                ),
                hardware=_guarded(lambda: hardware_facts(self._nvml, self._driver_s), Hardware),
                system=Platform(platform.platform(), platform.node()),
                supervise=_guarded(supervise_version, Supervisor),
            )
            identity = replace(
                identity,
                packages=_guarded(lambda: installed_packages(*collection.process()), Packages),
            )
        finally:
            self._code_is_known(CodeVersion(missing="not collected"))
            collection.finish(identity)


class _Collection:
    """One collection: the process that it asks about, and what it found."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.result = Identity()
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

    def finish(self, identity: Identity) -> None:
        self.result = identity
        self.done.set()


class ByteBudget:
    """How many bytes of files may still be hashed."""

    left = ALL_BYTES

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


def code_version(directory: Path, argv: Sequence[str]) -> CodeVersion:
    """Return the version of the job's code: of its working directory, else of its script."""
    version = host.read_git_facts(directory)
    scripts = [path.parent for path in _paths(argv, directory) if path.suffix == ".py"]
    for folder in scripts[:1]:
        if version.missing and folder != directory:
            version = host.read_git_facts(folder)
    # Untracked files come and go with what the job writes.
    return replace(version, dirty=UNSET, dirty_count=UNSET)


def _paths(argv: Sequence[str], directory: Path) -> list[Path]:
    """Return the files and directories that a command names, also as `--option=PATH` and `-m`."""
    paths: dict[Path, None] = {}
    for index, arg in enumerate(argv[1:], 1):
        names = [arg, arg.partition("=")[2]]
        if argv[index - 1] == "-m":
            names.append(f"{arg.replace('.', '/')}.py")
        for name in filter(None, names):
            with suppress(OSError, ValueError):  # too long for a path, or a NUL
                if (directory / name).exists():
                    paths[directory / name] = None
    return list(paths)


def _hashed(paths: Iterable[Path], directory: Path, budget: ByteBudget) -> dict[str, str]:
    return {
        str(path.relative_to(directory) if path.is_relative_to(directory) else path): digest
        for path in list(paths)[:MAX_FILES]
        for digest in (budget.digest(path),)
    }


def named_files(argv: Sequence[str], directory: Path, budget: ByteBudget) -> dict[str, str]:
    """Return the SHA-256 of each script and configuration file that the command names."""
    configs = (path for path in _paths(argv, directory) if path.suffix in CONFIGS)
    return _hashed((path for path in configs if path.is_file()), directory, budget)


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
    candidates = [folder / name for folder in places for name in sorted(RECOGNISED)]
    return _hashed(
        dict.fromkeys([*named, *(path for path in candidates if path.is_file())]), directory, budget
    )


def installed_packages(pid: int | None, reason: str = "") -> Packages:
    """Return the installed packages: of a process of the job, else of the supervisor, with why."""
    directories: list[str] = []
    source = JOB
    if pid is not None:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text("utf-8", "replace")
            directories = sorted(set(_LIBRARIES.findall(maps)))
            reason = "the job's process has loaded no package from a library of its own"
        except OSError as error:
            reason = f"the job's process cannot be read: {error.strerror}"
    if not directories:
        source = f"{SUPERVISOR}: {reason}"
        directories = [path for path in sys.path if Path(path).is_dir()]
    versions = dict(sorted(pair for folder in reversed(directories) for pair in _versions(folder)))
    listed = "".join(f"{name}=={version}\n" for name, version in versions.items())
    return Packages(
        source=source,
        directories=directories,
        sha256=hashlib.sha256(listed.encode()).hexdigest(),
        versions=versions,
    )


def _versions(directory: str) -> Iterator[tuple[str, str]]:
    with suppress(OSError):
        for path in Path(directory).iterdir():
            if (match := _PACKAGE.fullmatch(path.name)) is not None:
                yield re.sub(r"[-_.]+", "-", match[1]).lower(), match[2]


def hardware_facts(nvml: Callable[[], Any], driver_s: float) -> Hardware:
    """Return CPU, memory in bytes, and the devices with their driver."""
    model = platform.machine()
    with suppress(OSError):
        info = Path("/proc/cpuinfo").read_text("utf-8", "replace")
        model = next(iter(re.findall(r"^model name\s*: (.+)$", info, re.MULTILINE)), model)
    return replace(
        _within(driver_s, lambda: _devices(nvml())),
        cpu=model,
        cpus=psutil.cpu_count(),
        memory_bytes=psutil.virtual_memory().total,
    )


def _devices(nvml: Any) -> Hardware:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return Hardware(devices=[], driver=None)
    devices = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
        memory_bytes = None
        with suppress(nvml.NVMLError_NotSupported):
            memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        devices.append(Device(_text(name), _text(uuid), memory_bytes))
    return Hardware(devices=devices, driver=_text(nvml.nvmlSystemGetDriverVersion()))


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _pynvml() -> Any:
    import pynvml

    return pynvml


def _within(limit_s: float, read: Callable[[], Hardware]) -> Hardware:
    """Return the result of `read`, or that there was none in time; its thread is left behind."""
    results: list[Hardware] = []
    thread = Thread(target=lambda: results.append(_guarded(read, Hardware)), daemon=True)
    thread.start()
    thread.join(limit_s)
    return results[0] if results else Hardware(missing=f"no answer within {limit_s:g} s")


def supervise_version() -> Supervisor:
    """Return the version of this project, and a digest of the files that hold its formulas."""
    return Supervisor(version=__version__, formulas_sha256=formulas_digest())


def formulas_digest() -> str:
    """Return the SHA-256 over the sources of all detectors and collectors."""
    digest = hashlib.sha256()
    for name in FORMULAS:
        package, _, folder = name.partition("/")
        spec = importlib.util.find_spec(package)
        places = (spec.submodule_search_locations if spec is not None else None) or ()
        for path in sorted(
            path for location in places for path in Path(location, folder).glob("*.py")
        ):
            digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _guarded(read: Callable[[], P], part: Callable[..., P]) -> P:
    """Return the result of `read`, or why it failed: a broken part must not cost the others."""
    try:
        return read()
    except Exception as error:
        return part(missing=f"{type(error).__name__}: {error}")


def _guarded_digests(read: Callable[[], Digests]) -> Digests:
    """Return the result of `read`, or why it failed."""
    try:
        return read()
    except Exception as error:
        return {"missing": f"{type(error).__name__}: {error}"}


def compare_identities(previous: Identity, current: Identity) -> list[Difference]:
    """Return the fields that are known in both and differ."""
    changes = []
    for part in previous.__struct_fields__:
        old, new = getattr(previous, part), getattr(current, part)
        if old is UNSET or new is UNSET or _is_unknown(old, new):
            continue
        old_leaves, new_leaves = dict(_leaves(part, old)), dict(_leaves(part, new))
        changes += [
            Difference(name, old_leaves.get(name), new_leaves.get(name))
            for name in old_leaves.keys() | new_leaves.keys()
            if old_leaves.get(name) != new_leaves.get(name)
            and not _is_expected(name, old_leaves.get(name))
        ]
    return sorted(changes, key=lambda change: change.field)


def _is_unknown(old: object, new: object) -> bool:
    """Return whether a part is missing in one of both, or is of another source."""
    parts = [msgspec.to_builtins(part) for part in (old, new)]
    if not all(isinstance(part, dict) for part in parts):
        return False
    is_missing = any("missing" in part for part in parts)
    return is_missing or parts[0].get("source") != parts[1].get("source")


def _is_expected(name: str, old: Leaf) -> bool:
    """Return whether a difference repeats another one, or is a file that the job has written."""
    return name == "packages.sha256" or (name.startswith("inputs.") and old is None)


def _leaves(name: str, value: object) -> Iterator[tuple[str, Leaf]]:
    plain = msgspec.to_builtins(value)
    if isinstance(plain, dict):
        for key, inner in plain.items():
            yield from _leaves(f"{name}.{key}", inner)
    else:
        yield name, plain


def describe_differences(changes: Sequence[Difference]) -> str:
    """Return differences as one sentence."""
    parts = [
        f"{change.field} {_short(change.before)} → {_short(change.after)}" for change in changes[:4]
    ]
    suffix = f" and {len(changes) - 4} more" if len(changes) > 4 else ""
    return f"{'; '.join(parts)}{suffix}"


def _short(value: Leaf) -> str:
    if value is None:
        return "none"
    text = str(value).removeprefix("sha256:")
    return text[:12] if re.fullmatch(r"[0-9a-f]{40,64}", text) else text[:60]
