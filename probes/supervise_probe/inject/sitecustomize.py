"""The way in: Python imports this at its start, because its directory is first on PYTHONPATH.

Rules it keeps: nothing is imported that a bare `python -c pass` has not imported, but for two
modules that are built into the interpreter; nothing of ours is loaded before the job imports torch
or ends with an error; the job sees no trace (not on sys.path, no name of ours); the `sitecustomize`
that this one hides runs last, outside our `try`, with its own errors. This is the only file of its
directory.

Source: the way in of ddtrace and coverage; the life of `sitecustomize` in CPython's Lib/site.py.
"""

import os
import sys
from _thread import get_ident

TYPE_CHECKING = False  # typing itself would cost every Python start a millisecond
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, Dict, List, Optional

HERE = os.path.dirname(os.path.abspath(__file__))
CONFIG = os.environ.get("SUPERVISE_PROBE", "")
ARGV = getattr(sys, "orig_argv", [])
PID = os.getpid()
FRAMES = 32  # innermost ones of a call of `sys.exit` that are remembered
SPARED = (  # processes that train nothing, recognised by their command line
    "multiprocessing.resource_tracker",
    "torch._inductor.compile_worker",
    "torch/_inductor/compile_worker",
)
LIBRARIES = (  # modules whose library knows more than torch, or saves; see `hooks`
    "transformers.trainer",
    "lightning.pytorch.trainer.trainer",
    "pytorch_lightning.trainer.trainer",
    "accelerate.accelerator",
    "lightning.fabric.fabric",
    "lightning_fabric.fabric",
    "safetensors.torch",
    "torch.distributed.checkpoint.state_dict_saver",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.pipelining.stage",
)


def is_enabled() -> bool:
    """Whether this process is to be watched at all."""
    if not CONFIG or os.environ.get("SUPERVISE_DISABLE", "0") not in ("", "0"):
        return False
    line = " ".join(ARGV[1:8])
    return ARGV[1:3] not in (["-m", "pip"], ["-m", "venv"]) and not any(n in line for n in SPARED)


def write_marker(name: str, text: str = "") -> None:
    """Leave a small file in the run directory, which explains a probe that stays silent.

    A multiprocessing child is its parent's affair: a loader that starts workers every epoch must
    not fill the run directory.
    """
    if "--multiprocessing-fork" in ARGV and not text:
        return
    try:
        path = os.path.join(os.path.splitext(CONFIG)[0], "%s.%d" % (name, os.getpid()))
        # A FIFO of that name must not hold up the job: not waited for, no link followed.
        safe = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | safe, 0o600)
        try:
            os.write(fd, text.encode("utf-8", "replace"))
        finally:
            os.close(fd)
    except OSError:
        pass


def watch_end() -> None:
    """Have fatal signals dump their stacks into the `boot` mark, and errors recorded at the end.

    What the job enabled itself stays, and what it enables later takes the place of ours. A child of
    multiprocessing has no mark: its parent reports how it ended.
    """
    import atexit
    import faulthandler

    atexit.register(record_exit_error, record_exit_calls())
    if not faulthandler.is_enabled() and "--multiprocessing-fork" not in ARGV:
        path = os.path.join(os.path.splitext(CONFIG)[0], "boot.%d" % PID)
        safe = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        faulthandler.enable(os.open(path, os.O_WRONLY | os.O_APPEND | safe))


def record_exit_calls() -> "Dict[int, Any]":
    """Remember what each thread gave to `sys.exit` last: exit handlers cannot ask Python.

    Returns:
        thread -> (status, innermost frames as file, line, function), filled from now on; also found
        as the attribute `asked` of `sys.exit`.
    """
    deferred: "Dict[int, Any]" = {}
    original = sys.exit

    def exit(*status: "Any") -> "Any":
        frames: "List[Any]" = []
        frame = sys._getframe(1)
        while frame is not None and len(frames) < FRAMES:
            frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back  # type: ignore[assignment]
        deferred[get_ident()] = (status[0] if status else None, frames)
        original(*status)

    exit.__module__, exit.__qualname__, exit.__doc__ = "sys", "exit", original.__doc__
    exit.asked = deferred  # type: ignore[attr-defined]
    sys.exit = exit
    return deferred


def record_exit_error(exit_calls: "Dict[int, Any]") -> None:
    """Record the error that ends this process, if one does; its exit code stays."""
    try:
        status, frames = exit_calls.get(get_ident(), (None, ()))
        error = getattr(sys, "last_value", None)
        # Nothing is recorded of an interrupt, and what a first import evaluates makes its 130 a 1.
        if isinstance(error, KeyboardInterrupt):
            return
        if error is not None or status not in (None, 0):
            load().record_exit_error(os.path.splitext(CONFIG)[0], status, frames)
    except Exception:  # the job ends as it would have
        pass


def load() -> "ModuleType":
    """Return the probe's package, loaded by place under a name that no job uses."""
    loaded = sys.modules.get("_supervise_probe")
    if loaded is None:
        from importlib.util import module_from_spec, spec_from_file_location

        folder = os.path.dirname(HERE)
        spec = spec_from_file_location(
            "_supervise_probe",
            os.path.join(folder, "__init__.py"),
            submodule_search_locations=[folder],
        )
        if spec is None or spec.loader is None:
            raise ImportError("no probe in " + folder)
        loaded = sys.modules["_supervise_probe"] = module_from_spec(spec)
        try:
            spec.loader.exec_module(loaded)
        except BaseException:
            del sys.modules["_supervise_probe"]
            raise
    return loaded


def install_probe(torch: "ModuleType") -> None:
    """Switch the probe on; without it, the job goes on."""
    try:
        load().install_probe(torch, CONFIG)
        write_marker("armed")
    except Exception as error:
        write_marker("off", "%s: %s" % (type(error).__name__, error))


def listen(library: "ModuleType") -> None:
    """Let the probe hear what a training library knows; without that, the job goes on."""
    try:
        load().listen(library)
    except Exception:  # the probe itself reports what it can
        pass


class Loader:
    """Loads a module with its own loader, then arms the probe, or lets it listen."""

    def __init__(self, real: "Any", then: "Any") -> None:
        self._real = real
        self._then = then

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._real, name)

    def create_module(self, spec: "ModuleSpec") -> "Optional[ModuleType]":
        module: Optional[ModuleType] = self._real.create_module(spec)
        return module

    def exec_module(self, module: "Any") -> None:
        # The real loader is back before the body runs: inspect and pickle see no wrapper.
        module.__loader__ = module.__spec__.loader = self._real
        self._real.exec_module(module)
        self._then(module)


class ByName:
    """Answers `import supervise_probe` with the probe that is already there."""

    def create_module(self, spec: "ModuleSpec") -> "Optional[ModuleType]":
        return None

    def exec_module(self, module: "ModuleType") -> None:
        sys.modules["supervise_probe"] = load()


class Finder:
    """Watches for a few names and has no opinion on any other."""

    def __init__(self) -> None:
        self._asking = False  # another finder may ask all finders too

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name in WATCHED and not self._asking:
            self._asking = True
            try:
                return self._find(name, path, target)
            finally:
                self._asking = False
        if name == "supervise_probe":
            from importlib.machinery import ModuleSpec

            return ModuleSpec(name, ByName(), origin="supervise")  # type: ignore[arg-type]
        return None

    def _find(self, name: str, path: "Any", target: "Any") -> "Any":
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and finder is not self else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = Loader(spec.loader, WATCHED[name])
                return spec
        return None


WATCHED = {"torch": install_probe, **dict.fromkeys(LIBRARIES, listen)}


def boot_probe() -> None:
    """Take the own directory off the path, and wait for torch."""
    sys.path[:] = [p for p in sys.path if not p or os.path.abspath(p) != HERE]
    sys.path_importer_cache.pop(HERE, None)
    if is_enabled():
        write_marker("boot")
        try:
            watch_end()
        except Exception:  # then only the exit code tells how it ended
            pass
        if "torch" in sys.modules:  # a .pth file was faster
            install_probe(sys.modules["torch"])
        sys.meta_path.insert(0, Finder())


try:
    boot_probe()
except Exception:  # whatever it was, the job must start
    pass

# Hand over as if this file had never been there. Without another one the import fails under the
# name that site.py expects, and that takes this module out of sys.modules.
del sys.modules["sitecustomize"]
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
