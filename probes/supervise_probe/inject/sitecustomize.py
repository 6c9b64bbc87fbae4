"""The way in: Python imports this at its start, because its directory is first on PYTHONPATH.

Rules it keeps: nothing is imported that a bare `python -c pass` has not imported; nothing of ours
is loaded before the job imports torch; the job sees no trace (not on sys.path, no name of ours);
the `sitecustomize` that this one hides runs last, outside our `try`, with its own errors. This is
the only file of its directory.

Source: the way in of ddtrace and coverage; the life of `sitecustomize` in CPython's Lib/site.py.
"""

import os
import sys

_SPARED = (  # processes that train nothing; told by their command line, to save them the trouble
    "multiprocessing.resource_tracker",
    "torch._inductor.compile_worker",
    "torch/_inductor/compile_worker",
)


def _enter():
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if not p or os.path.abspath(p) != here]
    sys.path_importer_cache.pop(here, None)

    config = os.environ.get("SUPERVISE_PROBE")
    if not config or os.environ.get("SUPERVISE_DISABLE", "0") not in ("", "0"):
        return
    argv = getattr(sys, "orig_argv", None) or getattr(sys, "argv", None) or []
    line = " ".join(argv[1:8])
    if any(name in line for name in _SPARED) or argv[1:3] in (["-m", "pip"], ["-m", "venv"]):
        return
    # A multiprocessing child is its parent's affair: a loader that starts workers every epoch
    # must not fill the run directory.
    quiet = "--multiprocessing-fork" in argv
    marks = os.path.splitext(config)[0]

    def mark(name, text=""):
        if not quiet or text:
            try:
                path = os.path.join(marks, "%s.%d" % (name, os.getpid()))
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                try:
                    os.write(fd, text.encode("utf-8", "replace"))
                finally:
                    os.close(fd)
            except OSError:
                pass

    def load():
        """Return the probe's package, loaded by place under a name that no job uses."""
        found = sys.modules.get("_supervise_probe")
        if found is None:
            from importlib.util import module_from_spec, spec_from_file_location

            where = os.path.dirname(here)
            spec = spec_from_file_location(
                "_supervise_probe",
                os.path.join(where, "__init__.py"),
                submodule_search_locations=[where],
            )
            found = sys.modules["_supervise_probe"] = module_from_spec(spec)
            try:
                spec.loader.exec_module(found)
            except BaseException:
                del sys.modules["_supervise_probe"]
                raise
        return found

    def arm(torch):
        try:
            load().arm(torch, config)
            mark("armed")
        except Exception as error:
            mark("off", "%s: %s" % (type(error).__name__, error))

    class Loader:
        """Loads torch with its own loader, then arms the probe."""

        def __init__(self, real):
            self._real = real

        def __getattr__(self, name):
            return getattr(self._real, name)

        def create_module(self, spec):
            return self._real.create_module(spec)

        def exec_module(self, module):
            # The real loader is back before the body runs: inspect and pickle see no wrapper.
            module.__loader__ = module.__spec__.loader = self._real
            self._real.exec_module(module)
            arm(module)

    class ByName:
        """Answers `import supervise_probe` with the probe that is already there."""

        def create_module(self, spec):
            return None

        def exec_module(self, module):
            sys.modules["supervise_probe"] = load()

    class Finder:
        """Watches for two names and has no opinion on any other."""

        def __init__(self):
            self._asking = False  # another finder may ask all finders too

        def find_spec(self, name, path=None, target=None):
            if name == "torch" and not self._asking:
                self._asking = True
                try:
                    for finder in sys.meta_path:
                        find = getattr(finder, "find_spec", None)
                        spec = find(name, path, target) if find and finder is not self else None
                        if spec is not None:
                            if hasattr(spec.loader, "exec_module"):
                                spec.loader = Loader(spec.loader)
                            return spec
                finally:
                    self._asking = False
            elif name == "supervise_probe":
                from importlib.machinery import ModuleSpec

                return ModuleSpec(name, ByName(), origin="supervise")
            return None

    mark("boot")
    if "torch" in sys.modules:  # a .pth file was faster
        arm(sys.modules["torch"])
    sys.meta_path.insert(0, Finder())


try:
    _enter()
except Exception:  # whatever it was, the job must start
    pass

# Hand over as if this file had never been there. Without another one the import fails under the
# name that site.py expects, and takes this module out of sys.modules.
del sys.modules["sitecustomize"]
import sitecustomize  # noqa: E402, F401
