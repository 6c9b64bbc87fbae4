"""The model of a job, rebuilt from the structure that the probe wrote, with a checkpoint's weights.

The structure is a pickle of the job's own objects, and trusted: it is the file whose hash the probe
has reported. The checkpoint is not, and no code of it runs (`verify`).

Classes of the job's `__main__` come from its script, imported under another name without what it
does at its top level: loops, and calls for their effect. A script without a `__main__` guard is not
imported; with `reimport` its imports, classes, functions and plain assignments are.
"""

import ast
import io
import json
import os
import pickle
import random
import re
import sys
import types
from hashlib import sha256
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Optional

STRUCTURE = "supervise structure 1"  # as `supervise_probe.torch_state.structure`
SCRIPT = "supervise_job_main"  # the job's script, as a module here
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module")  # in names of weights
COMPILED = "OptimizedModule"  # a few forwards are not worth it, and a compiler has children
MODEL, OPTIMIZER, SCHEDULER, RANDOM = PARTS = ("model", "optimizer", "scheduler", "random")
RESTORED, ABSENT, FAILED, UNKNOWN = "restored", "absent", "failed", "unknown"
DAMAGE = ValueError, KeyError  # of a state; other errors are of the place where it is restored
SEGMENT = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
SHAPED = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # like the weight
DEPTH = 3
NAMED = 3  # weights that a sentence names


class UnknownError(Exception):
    """Nothing is known of the checkpoint; the text is one sentence for people."""


class Structure(NamedTuple):
    """What the probe wrote.

    Attributes:
        optimizers: without their state; None, and `lost` says why, where they do not pickle.
        moments: of how many weights each of them had a state.
    """

    model: Any
    optimizers: Optional[list[Any]]
    moments: list[int]
    lost: str


def read_structure(torch: Any, path: str, digest: str, *, reimport: bool) -> Structure:
    """Read a structure of which the first digits of the SHA-256 are known; its weights are zero.

    Raises:
        UnknownError: it is not the file that was reported, or cannot be rebuilt here.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise UnknownError(f"the structure of the model cannot be read: {error}") from None
    if len(digest) < 32 or not sha256(data).hexdigest().startswith(digest):
        raise UnknownError("the structure of the model is not the file that the job reported")
    line, _, rest = data.partition(b"\n")
    head = json.loads(line)
    if head.get("what") != STRUCTURE:
        raise UnknownError("the structure of the model is of another version")
    _use_paths(head)
    tensors = {name: _empty(torch, *row) for name, row in head["tensors"].items()}
    pickles, known = [], dict(tensors)
    for size in head["sizes"]:
        pickles.append(_Unpickler(torch, rest[:size], known, head["script"], reimport))
        rest = rest[size:]
    try:
        model = pickles[0].load()
    except UnknownError:
        raise
    except (Exception, SystemExit) as error:  # of any code of the job
        text = f"{type(error).__name__}: {error}"[:300]
        raise UnknownError(f"the model cannot be rebuilt: {text}") from None
    for module in model.modules():
        if type(module).__name__ == COMPILED:
            module.__dict__["forward"] = module._orig_mod.__call__
    optimizers, lost = None, head["lost"]
    try:
        optimizers = pickles[1].load() if len(pickles) > 1 else None
    except Exception as error:
        lost = f"{type(error).__name__}: {error}"[:200]
    return Structure(model, optimizers, head["moments"], lost)


def _use_paths(head: Mapping[str, Any]) -> None:
    """Look for modules where the job did, and in its working directory."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    inject = os.path.join(ours, "supervise_probe", "inject")
    sys.path[:] = [path for path in head["paths"] if path != inject]
    try:
        os.chdir(head["directory"])
    except OSError:
        pass  # it was removed: only what reads files there fails


def _empty(torch: Any, shape: list[int], dtype: str, parameter: bool, trains: bool) -> Any:
    tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
    return torch.nn.Parameter(tensor, requires_grad=trains) if parameter else tensor


class _Unpickler(pickle.Unpickler):
    """Reads a pickle of the probe's."""

    def __init__(
        self, torch: Any, data: bytes, tensors: dict[Any, Any], script: str, reimport: bool
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._torch, self._tensors = torch, tensors
        self._script, self._reimport = script, reimport

    def persistent_load(self, pid: Any) -> Any:
        key = pid if isinstance(pid, str) else pid[0]
        if key not in self._tensors:
            _, dtype, shape, data = pid
            value = self._torch.zeros(shape, dtype=getattr(self._torch, dtype))
            if data:
                flat = self._torch.frombuffer(bytearray(data), dtype=value.dtype)
                value.copy_(flat.view(shape))
            self._tensors[key] = value
        return self._tensors[key]

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__":
            if SCRIPT not in sys.modules:
                import_script(self._script, reimport=self._reimport)
            module = SCRIPT
        return super().find_class(module, name)


def import_script(path: str, *, reimport: bool) -> None:
    """Import the definitions of a script.

    Raises:
        UnknownError: it has no `__main__` guard, or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError) as error:
        raise UnknownError(f"the job's script cannot be read: {error}") from None
    guarded = any(isinstance(node, ast.If) and _names_main(node.test) for node in tree.body)
    if not (guarded or reimport):
        raise UnknownError(
            f"{path} has no `__main__` guard: its imports would run again; "
            "evaluate: {reimport: true} says that they may"
        )
    allowed = _has_no_effect if guarded else _is_definition
    tree.body = [node for node in tree.body if allowed(node)]
    module = sys.modules[SCRIPT] = types.ModuleType(SCRIPT)
    module.__file__ = path
    exec(compile(tree, path, "exec"), vars(module))  # noqa: S102


def _names_main(test: ast.expr) -> bool:
    return any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(test))


def _has_no_effect(node: ast.stmt) -> bool:
    """Whether a statement of a guarded script is what an import of it is for."""
    if isinstance(node, ast.If):
        return not _names_main(node.test)
    return not isinstance(node, (ast.Expr, ast.For, ast.While, ast.With))


def _is_definition(node: ast.stmt) -> bool:
    """Whether a statement only imports or defines something."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return not any(isinstance(inner, (ast.Call, ast.Await)) for inner in ast.walk(node))
    if isinstance(node, ast.Try):
        return all(map(_is_definition, node.body)) and not node.finalbody
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(node, kinds)


Objects = list[tuple[str, Any]]  # name of a file, and what is in it


def fill_weights(torch: Any, model: Any, objects: Objects) -> Iterator[None]:
    """Give the model the weights of a checkpoint, whatever they are nested in and prefixed with.

    Yields after each set of them: a checkpoint may hold averages beside.

    Raises:
        UnknownError: it does not hold all of them, each with its shape.
    """
    wanted: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        transient = module._non_persistent_buffers_set
        buffers = {n: b for n, b in module._buffers.items() if n not in transient}
        for name, tensor in (*module._parameters.items(), *buffers.items()):
            if tensor is not None:
                wanted[_plain(f"{prefix}.{name}" if prefix else name)] = tensor
    best: dict[str, Any] = {}
    tried: set[frozenset[int]] = set()
    for state in _weights_in(torch, objects):
        for offered in _aligned(wanted, {_plain(name): value for name, value in state.items()}):
            fits = {n: v for n, v in offered.items() if v.shape == wanted[n].shape}
            best = max(best, fits, key=len)
            filled = {id(wanted[name]) for name in fits}
            values = frozenset(map(id, fits.values()))
            if values in tried or any(id(tensor) not in filled for tensor in wanted.values()):
                continue
            tried.add(values)
            with torch.no_grad():
                for name, value in fits.items():
                    wanted[name].copy_(value)
            yield
    if not tried:
        filled = {id(wanted[name]) for name in best}
        lacks = [name for name, tensor in wanted.items() if id(tensor) not in filled]
        names = ", ".join(lacks[:NAMED])
        raise UnknownError(f"the checkpoint lacks {len(lacks)} of {len(wanted)} weights: {names}")


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _weights_in(torch: Any, objects: Objects) -> Iterator[dict[str, Any]]:
    """Yield every mapping of names to tensors; first that of all files, which may be shards."""
    several: list[dict[str, Any]] = []
    for thing in _mappings(objects):
        tensors = {k: v for k, v in thing.items() if isinstance(v, torch.Tensor)}
        if tensors and all(isinstance(name, str) for name in tensors):
            several.append(tensors)
    if len(objects) > 1:
        yield {name: value for state in several for name, value in state.items()}
    yield from several


def _mappings(objects: Objects) -> Iterator[dict[Any, Any]]:
    waiting = [(thing, 0) for _, thing in objects]
    while waiting:
        thing, depth = waiting.pop(0)
        if isinstance(thing, dict):
            yield thing
        if depth < DEPTH and isinstance(thing, (dict, list, tuple)):
            inner = thing.values() if isinstance(thing, dict) else thing
            waiting += [(v, depth + 1) for v in inner if isinstance(v, (dict, list, tuple))]


def _aligned(wanted: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what of `state` has wanted names, under each prefix that one side may have."""
    longest = max(wanted, key=len, default="")
    shifts: set[tuple[str, str]] = {("", "")}
    for name in state:
        if name.endswith("." + longest):
            shifts.add((name[: -len(longest)], ""))
        elif longest.endswith("." + name):
            shifts.add(("", longest[: -len(name)]))
    for ours, theirs in sorted(shifts):
        moved = {theirs + n[len(ours) :]: v for n, v in state.items() if n.startswith(ours)}
        yield {name: value for name, value in moved.items() if name in wanted}


def restore_parts(torch: Any, structure: Structure, objects: Objects) -> dict[str, str]:
    """Return what became of each part when it was restored: `restored`, `absent`, or a failure.

    `unknown: ...` where it cannot be tried here, which says nothing of the checkpoint.
    """
    several = list(_mappings(objects))
    saved = [m for m in several if m.keys() >= {"state", "param_groups"} and m["param_groups"]]
    schedules = [m for m in several if "last_epoch" in m]
    states = [
        (str(key), value)
        for mapping in (*several, dict(objects))
        for key, value in mapping.items()
        if _is_random(str(key))
    ]
    return {
        MODEL: RESTORED,
        OPTIMIZER: _part(saved, lambda state: _restore_optimizer(torch, structure, state)),
        SCHEDULER: _part(schedules, _check_schedule),
        RANDOM: _part(states, lambda item: _restore_random(torch, item[1])),
    }


def _is_random(name: str) -> bool:
    segments = [segment.lower() for segment in SEGMENT.findall(name)]
    pairs = zip(segments, segments[1:])
    return not {"rng", "rngs"}.isdisjoint(segments) or any(
        first == "random" and second in ("state", "states") for first, second in pairs
    )


def _part(several: list[Any], restore: Callable[[Any], None]) -> str:
    """Restore all states of a kind; return the verdict."""
    verdict = RESTORED if several else ABSENT
    for state in several:
        failure: Optional[Exception] = None
        try:
            restore(state)
        except Exception as error:
            failure = error
        text = (str(failure).splitlines() or [type(failure).__name__])[0][:200]
        if isinstance(failure, DAMAGE):
            return f"{FAILED}: {text}"
        verdict = verdict if failure is None else f"{UNKNOWN}: {text}"
    return verdict


def _restore_optimizer(torch: Any, structure: Structure, state: dict[str, Any]) -> None:
    if structure.optimizers is None:
        raise UnknownError(f"the optimizers of the job are not known: {structure.lost}")
    sizes = [len(group["params"]) for group in state["param_groups"]]
    failures: list[Exception] = []
    for optimizer, moments in zip(structure.optimizers, structure.moments):
        if sizes != [len(group["params"]) for group in optimizer.param_groups]:
            continue
        try:
            _load_moments(torch, optimizer, moments, state)
        except Exception as error:  # it may be that of another one alike
            failures.append(error)
        else:
            return
        finally:
            optimizer.state.clear()
    if not failures:
        raise UnknownError(f"no optimizer of the job has groups of {sizes} weights")
    raise next((e for e in failures if not isinstance(e, DAMAGE)), failures[0])


def _load_moments(torch: Any, optimizer: Any, moments: int, state: dict[str, Any]) -> None:
    if moments and not state["state"]:
        raise ValueError(f"it has no moments, those of {moments} weights in the job")
    optimizer.load_state_dict(state)
    for weight, own in optimizer.state.items():
        for name, value in own.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                if not bool(torch.isfinite(value).all()):
                    raise ValueError(f"{name} of a weight is not finite")
                if name in SHAPED and value.shape != weight.shape:
                    raise ValueError(f"{name} has the shape {tuple(value.shape)}")


def _check_schedule(state: dict[str, Any]) -> None:
    rates = state.get("_last_lr", [])
    if type(state["last_epoch"]) is not int or not all(0.0 <= rate < 1e9 for rate in rates):
        raise ValueError(f"a schedule at {state['last_epoch']!r} has the rates {rates}")


def _restore_random(torch: Any, state: Any) -> None:
    """Try a state of torch's CPU generator or of `random`; those of others are only there."""
    if isinstance(state, torch.Tensor) and state.dtype == torch.uint8 and state.numel() > 1000:
        try:
            torch.Generator().set_state(state)  # one of CUDA has 16 bytes
        except RuntimeError as error:
            raise ValueError(str(error)) from None
    elif isinstance(state, tuple) and len(state) == 3 and isinstance(state[1], tuple):
        random.Random().setstate(state)
