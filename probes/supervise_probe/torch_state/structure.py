"""Structure of a model, as far as samples need it, and on how many ranks each weight lies.

Blocks, routers, vocabularies and more are recognised by shape and name, since every library has
classes of its own; once for a model as it stands: the registry counts when modules come or go.
Holds modules weakly.

`WeightCopies` makes what all ranks hold add up to the job. It asks the objects that spread the
weights, on the host, without a message to another rank: the mesh and the placements of a DTensor
(FSDP2, tensor parallelism), the process group of FSDP1, the wrapper of DistributedDataParallel. A
plain parameter that none of these holds may be a replica that the job keeps by hand, or of another
stage of a pipeline: unknown.

`pickle_structure` writes a model and its optimizers without their weights, for a process that fills
in those of a checkpoint (`supervise_offline.evaluation`). What a checkpoint holds is left out by
name; tensors that no checkpoint holds, such as tables of rotations, are written by value.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle
import re
import sys
import weakref
from time import thread_time
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple, Optional

from .tensor_copies import has_readable_memory

if TYPE_CHECKING:
    from .records import OptimizerInfo, Optimizers, Position
    from .registry import Registry

MOST_EXPERTS = 1024
_ROUTER = re.compile(r"(^|_)(gate|router|wg)$|router")
_COUNTS = ("num_experts", "n_experts", "n_routed_experts", "num_local_experts", "num_expert")
_CHOSEN = (
    "top_k",
    "topk",
    "k",
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "num_selected_experts",
    "n_activated_experts",
    "moe_top_k",
)
_CAPACITY = ("expert_capacity", "capacity")
_PER_SEQUENCE = ("Switch", "Nllb")  # classes whose capacity holds for each sequence by itself


class Router(NamedTuple):
    """One MoE router.

    Attributes:
        name: as `named_modules` has it. module: weak.
        experts: how many there are. chosen: how many a token goes to, 1 where that is unknown.
        capacity: most tokens of one expert in a forward, None if it cannot be seen.
        factor: the same as a factor on an even share, None likewise.
    """

    name: str
    module: weakref.ref[Any]
    experts: int
    top_k: int
    capacity: Optional[int]
    factor: Optional[float]


class Structure:
    """The parts of one outermost module.

    Attributes:
        blocks: the repeated blocks in order, weak; empty if there are none.
        routers: in order.
        vocabularies: sizes of its embeddings; an output that wide holds logits.
        compiled: a part is compiled.
    """

    def __init__(self, torch: Any, root: Any) -> None:
        self.blocks = [weakref.ref(block) for block in _blocks(torch, root)]
        self.routers: list[Router] = []
        self.vocabularies: set[int] = set()
        self.compiled = False
        optimized = _optimized(torch)
        parents: dict[str, Any] = {}
        for name, module in root.named_modules():
            parents[name] = module
            visited = (
                module.__dict__.get("_compiled_call_impl") if name else None
            )  # the root's: ours
            if visited is not None or "_torchdynamo_orig_callable" in _forward(module):
                self.compiled = True
            self.compiled = self.compiled or type(module) is optimized
            weight = module._parameters.get("weight")
            if weight is None or weight.dim() != 2:
                continue
            if isinstance(module, torch.nn.Embedding):
                self.vocabularies.add(int(weight.shape[0]))
            parent = parents.get(name.rpartition(".")[0], root)
            router = _router(torch, name, module, parent, int(weight.shape[0]))
            if router is not None:
                self.routers.append(router)


class Structures:
    """Finds the structure of a model, and remembers it until modules come or go."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._known: Optional[tuple[Any, int, Structure]] = None

    def structure_of(self, root: Any, changes: int) -> Structure:
        """Return the structure of `root`; `changes` is the registry's count of them."""
        cached = self._known
        if cached is None or cached[0]() is not root or cached[1] != changes:
            cached = self._known = weakref.ref(root), changes, Structure(self._torch, root)
        return cached[2]


def _blocks(torch: Any, root: Any) -> list[Any]:
    """Return the longest list of alike modules that have modules of their own.

    A list inside an element of another, such as the experts of a layer, is none.
    """
    best: list[Any] = []
    waiting = [root]
    while waiting:
        module = waiting.pop(0)
        children = list(module.children())
        alike = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and (
            len(children) > 1
            and len(set(map(type, children))) <= 2
            and all(any(True for _ in child.children()) for child in children)
        )
        if alike and len(children) > len(best):
            best = children
        if not alike:
            waiting += children
    return best


def _router(torch: Any, name: str, module: Any, parent: Any, experts: int) -> Optional[Router]:
    leaf = name.rpartition(".")[2]
    if not _ROUTER.search(leaf) and "Router" not in type(module).__name__:
        return None
    if not 2 <= experts <= MOST_EXPERTS or not _has_experts(torch, module, parent, experts):
        return None
    homes = (module, parent, getattr(parent, "config", None), getattr(module, "config", None))
    alone = type(module).__name__.startswith(_PER_SEQUENCE)
    factor = None if alone else _number(homes, ("capacity_factor",))
    capacity = None if alone else _number(homes, _CAPACITY)
    top_k = int(_number(homes, _CHOSEN) or 1)
    return Router(
        name,
        weakref.ref(module),
        experts,
        min(max(1, top_k), experts),
        None if capacity is None else int(capacity),
        factor,
    )


def _has_experts(torch: Any, module: Any, parent: Any, experts: int) -> bool:
    """Whether something beside the router says that there are that many experts."""
    for home in (module, parent, getattr(parent, "config", None)):
        if any(getattr(home, name, None) == experts for name in _COUNTS):
            return True
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    if any(isinstance(c, lists) and len(c) == experts for c in parent.children()):
        return True
    return any(p.dim() == 3 and p.shape[0] == experts for p in parent.parameters())


def _number(homes: tuple[Any, ...], names: tuple[str, ...]) -> Optional[float]:
    for home in homes:
        for name in names:
            value = getattr(home, name, None)
            if value is not None and type(value) in (int, float) and value > 0:
                return float(value)
    return None


def _optimized(torch: Any) -> Any:
    frame = sys.modules.get("torch._dynamo.eval_frame")
    return getattr(frame, "OptimizedModule", None)


def _forward(module: Any) -> dict[str, Any]:
    """Return the attributes of a `forward` that the module has of its own."""
    forward = module.__dict__.get("forward")
    return getattr(forward, "__dict__", None) or {}


def nested_leaves(value: Any, depth: int = 2) -> Iterator[Any]:
    """Yield what is in nested tuples, lists and dicts."""
    if isinstance(value, dict) and depth:
        for item in value.values():
            yield from nested_leaves(item, depth - 1)
    elif isinstance(value, (tuple, list)) and depth:
        for item in value:
            yield from nested_leaves(item, depth - 1)
    else:
        yield value


_EMPTY: dict[str, Any] = {}  # stands for an attribute that is not there


def own_attributes(thing: Any) -> dict[str, Any]:
    """The attributes that the object itself holds, in its dict and in its slots."""
    if isinstance(thing, type):
        return dict(vars(thing))
    attributes = dict(_held_value(thing, "__dict__"))
    for name in slot_names(type(thing)):
        value = _held_value(thing, name)
        if value is not _EMPTY:
            attributes[name] = value
    return attributes


def _held_value(thing: Any, name: str) -> Any:
    try:
        return object.__getattribute__(thing, name)
    except AttributeError:
        return _EMPTY


def slot_names(kind: type) -> list[str]:
    """The names of the slots that a class and its bases define."""
    names: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def set_attribute(thing: Any, name: str, value: Any) -> None:
    """Set what `attributes` reads; works on frozen dataclasses, slots and classes as well."""
    if isinstance(thing, type):
        type.__setattr__(thing, name, value)
        return
    attributes = _held_value(thing, "__dict__")
    if attributes is not _EMPTY and name not in slot_names(type(thing)):
        attributes[name] = value
    else:
        object.__setattr__(thing, name, value)


WRAPPER = "DistributedDataParallel"
GROUPS = ("process_group", "dp_cp_group")  # PyTorch's, Megatron's; one of apex has all ranks


def replicated_parameters(registry: Registry, ranks: int) -> set[int]:
    """Return the ids of parameters that all ranks must have alike.

    Not shards of one, nor what a wrapper of a part of the ranks holds, or leaves to each rank.
    """
    return {
        id(p)
        for wrapper in registry.modules
        if type(wrapper).__name__ == WRAPPER and _wrapper_ranks(wrapper, ranks) == ranks
        for name, p in wrapper.module.named_parameters()
        if p.numel() and name not in getattr(wrapper, "parameters_to_ignore", ())
        if not hasattr(p, "_local_tensor")
    }


def _wrapper_ranks(wrapper: Any, ranks: int) -> int:
    groups = (getattr(wrapper, name, None) for name in GROUPS)
    return next((int(group.size()) for group in groups if group is not None), ranks)


class Replicas:
    """Whether all parameters of an optimizer are replicated; looked up when either changes."""

    def __init__(self, registry: Registry, position: Position) -> None:
        self._registry, self._position = registry, position
        self._ids: frozenset[int] = frozenset()
        self._changes = -1
        self._all = False

    def contain_all(self, parameter_ids: frozenset[int]) -> bool:
        """Return whether all of these are, the `parameter_ids` of an `OptimizerInfo`."""
        changes = self._registry.modules.changes
        if parameter_ids is not self._ids or changes != self._changes:
            self._ids, self._changes = parameter_ids, changes
            replicated = replicated_parameters(self._registry, self._position.world_size)
            self._all = parameter_ids <= replicated
        return self._all


FSDP1 = "FullyShardedDataParallel"


class WeightCopies:
    """Counts the copies of parameters; looked up again when the modules or the ranks change."""

    def __init__(self, registry: Registry, optimizers: Optimizers, position: Position) -> None:
        self._registry, self._optimizers, self._position = registry, optimizers, position
        self._looked = (-1, 0)
        self._by_id: dict[int, int] = {}
        self._uniform: dict[frozenset[int], Optional[int]] = {}

    @property
    def has_other_ranks(self) -> bool:
        """Whether there are other ranks."""
        return self._position.world_size > 1

    def uniform_copy_count(self, info: OptimizerInfo) -> Optional[int]:
        """Return the number that all parameters of an optimizer share, else None.

        Remembered, since a step may have thousands of them.
        """
        self._look()
        if info.ids not in self._uniform:
            counts = {self._copies_of(parameter) for parameter in info.params}
            self._uniform[info.ids] = counts.pop() if len(counts) == 1 else None
        return self._uniform[info.ids]

    def groups(self, params: list[Any]) -> dict[int, list[Any]]:
        """Return `params` by the number of their copies; empty where one's is not known."""
        ranks: dict[int, list[Any]] = {}
        self._look()
        for parameter in params:
            copies = self._copies_of(parameter)
            if copies is None:
                return {}
            ranks.setdefault(copies, []).append(parameter)
        return ranks

    def batch_copies(self) -> float:
        """Return how many ranks read the same batch: those that split a layer among them."""
        meshes = (getattr(p, "device_mesh", None) for p in self._optimizers.parameters())
        spread = max((mesh.size() for mesh in meshes if mesh is not None), default=1)
        return max(1.0, spread / max(map(_data_parallel, self._registry.modules), default=1))

    def _look(self) -> None:
        ranks = self._position.world_size
        state = self._registry.modules.changes, ranks
        if state == self._looked:
            return
        self._looked = state
        self._uniform.clear()
        self._by_id = dict.fromkeys(replicated_parameters(self._registry, ranks), ranks)
        for module in self._registry.modules:
            if type(module).__name__ == FSDP1:
                is_whole = getattr(module.sharding_strategy, "name", "") == "NO_SHARD"
                copies = ranks if is_whole else ranks // module.process_group.size()
                self._by_id.update({id(p): copies for p in module.parameters()})

    def _copies_of(self, parameter: Any) -> Optional[int]:
        if not hasattr(parameter, "_local_tensor"):
            return self._by_id.get(id(parameter))
        mesh, copies = parameter.device_mesh, 1
        if mesh.size() != self._position.world_size:  # others may hold other stages of a pipeline
            return None
        for dimension, placement in enumerate(parameter.placements):
            copies *= mesh.size(dimension) if placement.is_replicate() else 1
        return copies


def _data_parallel(module: Any) -> int:
    """Return over how many ranks FSDP2 spreads the batches of this module; 1 where it does not."""
    state = getattr(module, "_get_fsdp_state", None)
    group = None if state is None else getattr(state(), "_fsdp_param_group", None)
    info = getattr(group, "mesh_info", None)
    sizes = (getattr(info, "shard_mesh_size", 1), getattr(info, "replicate_mesh_size", 1))
    return int(sizes[0] * sizes[1])


STRUCTURE = "supervise structure 1"
MOST_VALUES = 32 << 20  # bytes of tensors and arrays that no checkpoint holds; project default
# Of this thread's CPU, once: a model may hold its data. A Llama of 32 layers takes 0.04.
MOST_S, LOOK_EVERY = 0.25, 1024
_WRAPPED = ("_orig_mod", "module")  # of torch.compile, of DistributedDataParallel and its like
_WRAPPERS = ("OptimizedModule", WRAPPER, "DataParallel")


class StructureError(Exception):
    """A structure cannot be written; the text is one sentence for people."""


def pickle_structure(torch: Any, root: Any, optimizers: list[Any]) -> bytes:
    """Return a model and those of its optimizers that pickle, as a file.

    A JSON line says which tensors are left out, and where the job finds its code; then come the
    pickles of the model and of the list of optimizers. Nothing of the job is changed.

    Raises:
        StructureError: it is sharded, or cannot be pickled.
    """
    while type(root).__name__ in _WRAPPERS:
        root = next(root._modules[name] for name in _WRAPPED if name in root._modules)
    saved: dict[int, str] = {}
    tensors: dict[str, list[Any]] = {}
    for prefix, module in root.named_modules():
        kept = module._non_persistent_buffers_set
        own = {n: b for n, b in module._buffers.items() if n not in kept}
        for name, tensor in (*module._parameters.items(), *own.items()):
            if tensor is not None and id(tensor) not in saved:
                saved[id(tensor)] = path = f"{prefix}.{name}" if prefix else name
                dtype = str(tensor.dtype).rpartition(".")[2]
                is_parameter = name in module._parameters
                tensors[path] = [[*tensor.shape], dtype, is_parameter, tensor.requires_grad]
    parts, lost = [_pickle(torch, saved, root)], ""
    try:
        parts.append(_pickle(torch, saved, optimizers))
    except StructureError as error:
        lost = str(error)
    main = sys.modules.get("__main__")
    head = {
        "what": STRUCTURE,
        "tensors": tensors,
        "sizes": [len(part) for part in parts],
        "moments": [len(optimizer.state) for optimizer in optimizers],
        "lost": lost,
        "script": os.path.abspath(getattr(main, "__file__", None) or ""),
        "paths": [os.path.abspath(path) for path in sys.path if isinstance(path, str)],
        "directory": os.getcwd(),
    }
    return b"".join((json.dumps(head).encode(), b"\n", *parts))


def _pickle(torch: Any, saved: dict[int, str], thing: Any) -> bytes:
    file = io.BytesIO()
    try:
        _StructurePickler(torch, saved, file).dump(thing)
    except StructureError:
        raise
    except Exception as error:  # of any code: the job's classes say how they are pickled
        text = (str(error).strip().splitlines() or [""])[0][:200]
        raise StructureError(f"its structure does not pickle: {text}") from None
    return file.getvalue()


class _StructurePickler(pickle.Pickler):
    def __init__(self, torch: Any, saved: dict[int, str], file: Any) -> None:
        super().__init__(file, protocol=4)
        self._torch, self._saved = torch, saved
        self._room = MOST_VALUES
        self._values: list[Any] = []  # alive, so that each has an id of its own
        self._count, self._until_s = 0, thread_time() + MOST_S

    def persistent_id(self, thing: Any) -> Any:
        kind = type(thing)
        self._count += 1
        if self._count % LOOK_EVERY == 0 and thread_time() > self._until_s:
            raise StructureError("its structure holds too much, perhaps data: it took over 0.25 s")
        if kind in (str, bytes, bytearray):
            self._take_room(len(thing))
        elif kind.__module__ == "numpy":
            self._take_room(int(getattr(thing, "nbytes", 0)))
        if not issubclass(kind, self._torch.Tensor):
            if not issubclass(kind, self._torch.nn.Module):
                self._refuse_large(kind, thing)
            return None
        if kind not in (self._torch.Tensor, self._torch.nn.Parameter):
            raise StructureError(f"a weight is a {kind.__name__}")
        if id(thing) in self._saved:
            return self._saved[id(thing)]
        count = thing.numel() * thing.element_size()
        self._take_room(count)
        if not has_readable_memory(thing):
            raise StructureError("a weight has no memory of its own")
        self._values.append(thing)
        host = thing.detach().cpu().contiguous()
        value = ctypes.string_at(host.data_ptr(), count) if count else b""
        return id(thing), str(host.dtype).rpartition(".")[2], [*host.shape], value

    def _refuse_large(self, kind: type, thing: Any) -> None:
        """A table may be made a pickle of in one call, which nothing ends."""
        for name in ("nbytes", "size"):
            if hasattr(kind, name):
                size = getattr(thing, name, None)
                if type(size) is int and size > self._room:
                    raise StructureError(f"its structure holds a {kind.__name__}, perhaps data")

    def _take_room(self, count: int) -> None:
        self._room -= count
        if self._room < 0:
            raise StructureError(f"its structure holds over {MOST_VALUES:,} bytes, perhaps data")

    def reducer_override(self, thing: Any) -> Any:
        module = issubclass(type(thing), self._torch.nn.Module)
        if not module and not issubclass(type(thing), self._torch.optim.Optimizer):
            return NotImplemented
        reduced = thing.__reduce_ex__(4)
        if len(reduced) < 3 or type(reduced[2]) is not dict:
            return reduced
        state = dict(reduced[2])
        if not module:
            state["state"] = {}
        state.pop("_compiled_call_impl", None)  # ours, or of torch.compile
        state.pop("reset_parameters", None)  # often a function in one; weights are filled in
        for key, hooks in state.items():
            if module and "_hooks" in key and isinstance(hooks, dict):
                state[key] = type(hooks)((k, h) for k, h in hooks.items() if _is_torchs(h))
        return (*reduced[:2], state, *reduced[3:])


def _is_torchs(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("torch.")
