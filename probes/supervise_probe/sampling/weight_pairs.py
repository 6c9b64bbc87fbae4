"""Copies of a few matrices, in pairs a few steps apart, for the spectra of their changes.

Watched are the weights behind queries and keys of up to LAYERS layers, routers of experts, and as
many others. A pair is copied between two steps, and a thread writes it into the directory of the
segments, where a process beside the job reads it (`supervise_offline.mechanisms`). No other is
taken before the supervisor has removed that file, so what it can afford decides how often; a pair
is always fresh.

Which weights make a query is found without names, from the graph of what
`scaled_dot_product_attention` was given, back to the first matrix product. Views are undone by
calling their nodes with numbers that differ by head, from which follows for each row of the
weight which head it belongs to, however fused or interleaved they are. Whatever keeps the shape,
such as norms and rotations, is passed through; no node that holds a tensor is called, and nothing
of the job's gradients is touched.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import weakref
from time import monotonic_ns, sleep, thread_time_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from ..runtime.files import replacing_file
from .activations import spread_evenly

if TYPE_CHECKING:
    from ..context import ProbeContext
    from ..runtime.files import Background
    from ..torch_state.structure import Router, Structure

FILE = "weight-pair"  # in the directory of the segments
LAYERS, OTHERS, ROUTERS = 8, 8, 8
LARGEST = 4096  # the smaller side of a matrix: 4 s of a CPU; project default
MOST_BYTES = 256 << 20  # of a file, and so of the host's memory
FREE_PART = 8  # part of what is free there
CALL = 1 << 24  # numbers of a query that are followed through the graph
NODES = 200
SHARE = 0.002  # of the wall time, for copies and for the graph: a fifth of the 1 % of both defaults
PIECE = 1 << 20

_VIEW = re.compile(
    r"^(View|UnsafeView|ReshapeAlias|T|Transpose|Permute|Expand|Squeeze|Unsqueeze|Slice|Select"
    r"|Split\w*|Unbind|Cat|Stack|Clone|ToCopy|Alias|Repeat|ViewAsComplex|ViewAsReal)Backward\d*$"
)
_PRODUCT = re.compile(r"^(Mm|Addmm)Backward\d*$")
_LEAF = "AccumulateGrad"


class NotFoundError(Exception):
    """The weights behind a query or key are not found; the text is one sentence for people."""


class Origin(NamedTuple):
    """The weight behind queries or keys.

    Attributes:
        rows: of the weight as [out, in], by head. is_transposed: it is stored as [in, out].
    """

    weight: Any
    rows: list[list[int]]
    is_transposed: bool


def find_origin(torch: Any, tensor: Any) -> Origin:
    """Return the weight behind what attention was given as query or key, and the rows of heads.

    Raises:
        NotFoundError: it is not made of one product with one plain matrix.
    """
    if tensor.grad_fn is None or tensor.dim() != 4:
        raise NotFoundError("attention was called without gradients, or not with four dimensions")
    if tensor.numel() > CALL:
        raise NotFoundError(f"a query of {tensor.numel():,} numbers is too large to be followed")
    nodes = _nodes_between(tensor.grad_fn)
    heads = torch.arange(1.0, tensor.shape[1] + 1.0).view(1, -1, 1, 1).expand(tensor.shape)
    product, ones = _undo(nodes, tensor, torch.ones(()).expand(tensor.shape))
    _, numbered = _undo(nodes, tensor, heads)
    weight, is_transposed = _weight(product)
    by_number: dict[float, list[int]] = {}
    width = ones.shape[-1]
    many, sums = (grad.reshape(-1, width).double().sum(0).tolist() for grad in (ones, numbered))
    for row, (count, total) in enumerate(zip(many, sums)):
        if count > 0.0:
            by_number.setdefault(round(total / count, 4), []).append(row)
    rows = [by_number[number] for number in sorted(by_number)]
    if any(len(of_head) != tensor.shape[-1] for of_head in rows):
        raise NotFoundError("the rows of the weight do not belong to one head each")
    if width != weight.shape[1 if is_transposed else 0]:
        raise NotFoundError("the weight is not as wide as the product")
    return Origin(weight, rows, is_transposed)


def _nodes_between(start: Any) -> list[Any]:
    """Return the graph's nodes from `start` to the nearest products, each before what it needs."""
    order: list[Any] = []
    seen, waiting = set(), [(start, False)]
    while waiting:
        node, is_left = waiting.pop()
        if is_left:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        if len(seen) > NODES:
            raise NotFoundError("no matrix product is near")
        waiting.append((node, True))
        if not _PRODUCT.match(node.name()):
            waiting += [(following, False) for following, _ in node.next_functions if following]
    return order[::-1]


def _undo(nodes: list[Any], tensor: Any, grad: Any) -> tuple[Any, Any]:
    """Return the one product that `tensor` is made of, and `grad` as it is there."""
    grads: dict[Any, dict[int, Any]] = {nodes[0]: {tensor.output_nr: grad}}
    products = []
    for node in nodes:
        own = grads.pop(node, None)
        if own is None or node.name().endswith(_LEAF):
            continue
        if _PRODUCT.match(node.name()):
            products.append((node, own[0]))
            continue
        for (following, number), share in zip(node.next_functions, _shares(node, own)):
            if following is not None and share is not None:
                sums = grads.setdefault(following, {})
                sums[number] = share if number not in sums else sums[number] + share
    if len(products) != 1:
        raise NotFoundError(f"it is made of {len(products)} matrix products")
    return products[0]


def _shares(node: Any, own: dict[int, Any]) -> Any:
    """Return what goes on to each of the node's inputs."""
    if _VIEW.match(node.name()):
        outputs = [own.get(number) for number in range(len(node._input_metadata))]
        shares = node(*outputs)
        return shares if isinstance(shares, tuple) else (shares,)
    shares = []
    for following, number in node.next_functions:
        shape = following and tuple(following._input_metadata[number].shape)
        alike = [grad for grad in own.values() if tuple(grad.shape) == shape]
        shares.append(sum(alike[1:], alike[0]) if alike else None)
    return shares


def _weight(product: Any) -> tuple[Any, bool]:
    """Return the plain matrix of a product, and whether it is stored as [in, out]."""
    node = product.next_functions[2 if product.name().startswith("Add") else 1][0]
    is_transposed = True
    while node is not None and _VIEW.match(node.name()):
        if node.name() in ("TBackward0", "TransposeBackward0"):
            is_transposed = not is_transposed
        elif not node.name().startswith("ToCopy"):
            break
        node = node.next_functions[0][0]
    weight = getattr(node, "variable", None)
    if weight is None or weight.dim() != 2 or is_sharded(weight):
        raise NotFoundError("it is no product with a plain matrix")
    return weight, is_transposed


def is_sharded(weight: Any) -> bool:
    """Return whether this rank has a part of it only."""
    return hasattr(weight, "_local_tensor")


class Watched(NamedTuple):
    """One matrix of the file; `rows` None: all of it."""

    name: str
    weight: Any  # a weak reference
    rows: Any = None
    is_transposed: bool = False
    layer: int = -1
    role: str = ""
    heads: int = 1


class WeightPairs:
    """The pairs of one process.

    Attributes:
        next: the step at whose beginning there is something to do.
        is_on: the policy asks for them.
        off: the reason that there are none, "" while there may be.
        skipped: pairs that were not taken since the newest, for their cost.
    """

    def __init__(self, context: ProbeContext) -> None:
        self._torch, self._context = context.torch, context
        settings = context.config.mechanisms
        self.off = "" if settings else "the policy has no `mechanisms`"
        self.is_on = bool(settings)
        self._every = int((settings or {}).get("every", 100))
        self._distance = int((settings or {}).get("distance", 25))
        self._share = float((settings or {}).get("share", SHARE))
        self._part = context.guard.part("spectra", share=1.0)
        self._path = os.path.join(context.config.shm, FILE)
        self.background: Optional[Background] = None
        self.next = 0 if settings else 1 << 62
        self.skipped = 0
        self._calls, self._seen = 0, 0  # of the forward before, and of this one
        self._not_before_ns = self._spent_ns = 0
        self._changes = -1
        self._vocabularies: set[int] = set()
        self._routers: list[Router] = []
        self._layers: dict[int, list[Watched]] = {}
        self._problems: dict[int, str] = {}
        self._watched: list[Watched] = []
        self._before: Optional[tuple[int, int, dict[int, Any]]] = None  # step, attempt, copies
        self._reserve: list[dict[int, Any]] = []

    def describe(self) -> str:
        """Return how often pairs are taken, or why not."""
        if self.off:
            return f"off: {self.off}"
        if not self._watched:
            return "the weights of attention are not found yet"
        roles = [watched.role for watched in self._watched]
        nouns = (("query", "layers"), ("router", "routers"), ("", "other matrices"))
        texts = [f"{roles.count(role)} {noun}" for role, noun in nouns if role in roles]
        return f"{', '.join(texts)}, every {self._every * (1 + self.skipped)} steps"

    def thinned(self) -> dict[str, int]:
        """Return how many steps are between two pairs, where it is more than it should be."""
        return {"spectra": self._every * (1 + self.skipped)} if self.skipped else {}

    # ── which weights ─────────────────────────────────────────────────────────────────────────

    def begin_forward(self, structure: Structure) -> None:
        """A forward is watched whose calls of attention come next."""
        self._calls, self._seen, self._spent_ns = self._seen, 0, 0
        self._vocabularies, self._routers = structure.vocabularies, structure.routers
        changes = self._context.registry.modules.changes
        if changes != self._changes:
            self._changes, self._calls = changes, 0
            self._layers, self._problems, self._watched = {}, {}, []

    def record_attention_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`scaled_dot_product_attention` was called with these."""
        call, self._seen = self._seen, self._seen + 1
        if self.off or call in self._layers or call in self._problems:
            return
        if call not in spread_evenly(self._calls, LAYERS) or monotonic_ns() < self._not_before_ns:
            return
        began = thread_time_ns()
        query = args[0] if args else kwargs["query"]
        key = args[1] if len(args) > 1 else kwargs["key"]
        find = self._context.gate.call_without_grad
        self._context.guard.run(self._part, find, self._find, call, query, key)
        self._spend(thread_time_ns() - began)

    def _find(self, call: int, query: Any, key: Any) -> None:
        try:
            both = [find_origin(self._torch, tensor) for tensor in (query, key)]
        except NotFoundError as problem:
            self._problems[call] = str(problem)
            return
        self._layers[call] = []
        for role, origin in zip(("query", "key"), both):
            rows = self._torch.tensor([row for of_head in origin.rows for row in of_head])
            weight, heads = weakref.ref(origin.weight), len(origin.rows)
            watched = Watched(role, weight, rows, origin.is_transposed, call, role, heads)
            self._layers[call].append(watched)

    def _spend(self, cost_ns: int) -> None:
        """Wait so long that this was its share of the time; small costs of one forward add up."""
        self._spent_ns += cost_ns
        if self._spent_ns > 2_000_000:
            self._not_before_ns = monotonic_ns() + int(self._spent_ns / self._share)
            self._spent_ns = 0

    def _choose(self) -> bool:
        """Choose the matrices once all layers were looked at; whether there are any."""
        calls = spread_evenly(self._calls, LAYERS)
        if (
            self._watched
            or not calls
            or any(call not in self._layers and call not in self._problems for call in calls)
        ):
            return bool(self._watched)
        if not self._layers:
            self.off = next(iter(self._problems.values()))
            self._context.reporter.status_changed()
            return False
        pairs = [watched for call in sorted(self._layers) for watched in self._layers[call]]
        routers = self._choose_routers()
        if self._size(routers) > MOST_BYTES:
            routers = []
        taken = {id(watched.weight()) for watched in (*routers, *pairs)}
        others = []
        for root in self._context.registry.roots():
            vocabularies = self._vocabularies
            others += [
                Watched(name, weakref.ref(weight))
                for name, weight in root.named_parameters()
                if id(weight) not in taken
                and self._fits(weight)
                and not vocabularies & {*weight.shape}
            ]
        rest = pairs + [others[i] for i in spread_evenly(len(others), OTHERS)]
        while rest and self._size(routers + rest) > MOST_BYTES:
            rest = rest[: (len(rest) + 1) // 4 * 2]  # a query with its key
        self._watched = routers + rest
        self._context.reporter.status_changed()
        if not self._watched:
            self.off = f"two copies of one layer take more than {MOST_BYTES:,} bytes"
        return bool(self._watched)

    def _choose_routers(self) -> list[Watched]:
        """Return routers whose weight has a row for each expert; their layers are counted here."""
        routers = []
        for layer in spread_evenly(len(self._routers), ROUTERS):
            router = self._routers[layer]
            weight = getattr(router.module(), "weight", None)
            if weight is None or weight.dim() != 2 or is_sharded(weight):
                continue
            if weight.shape[0] == router.experts and weight.is_floating_point():
                watched = Watched(router.name, weakref.ref(weight), layer=layer, role="router")
                routers.append(watched)
        return routers

    def _fits(self, weight: Any) -> bool:
        plain = weight.dim() == 2 and not is_sharded(weight)
        return plain and weight.is_floating_point() and 16 <= min(weight.shape) <= LARGEST

    def _size(self, matrices: list[Watched]) -> int:
        weights = [watched.weight() for watched in matrices]
        return sum(8 * weight.numel() for weight in weights if weight is not None)

    # ── the copies ────────────────────────────────────────────────────────────────────────────

    def measure_between_steps(self, next_step: int) -> None:
        """The step before `next_step` has ended: take what is due. Never waits for a device."""
        self.next = (next_step // self._every + 1) * self._every
        if self._context.position.rank:
            self.off, self.next = "the leading rank has them", 1 << 62
        self._context.guard.run(
            self._part, self._context.gate.call_without_grad, self._between, next_step
        )

    def _between(self, step: int) -> None:
        if self.off or self.background is None or not self._choose():
            return
        began = thread_time_ns()
        attempt = self._context.position.attempt
        if self._before is None:
            dear = monotonic_ns() < self._not_before_ns
            if dear or os.path.exists(self._path) or self.background.busy:
                self.skipped += 1
                self._context.reporter.status_changed()
                return
            self._before = step, attempt, self._copy()
            self.next = step + self._distance
        else:
            (first, of_attempt, before), self._before = self._before, None
            if of_attempt == attempt and step == first + self._distance:
                after = self._copy()
                self.skipped = 0
                events = [
                    self._context.scalars.event(device)
                    for device in {w.device for w in self._weights() if w.device.type != "cpu"}
                ]
                head = {"step": step - 1, "steps": self._distance, "attempt": attempt}
                self.background.do(self._write, head, list(self._watched), before, after, events)
            else:
                self._reserve.append(before)
        self._spend(thread_time_ns() - began)

    def _weights(self) -> list[Any]:
        weights = [watched.weight() for watched in self._watched]
        if any(weight is None for weight in weights):
            self._changes = -1  # the job made another model
            raise RuntimeError("a watched matrix is gone")
        return weights

    def _copy(self) -> dict[int, Any]:
        """Copy each weight once, into memory of earlier copies where there is any."""
        torch, reserve, copies = self._torch, self._reserve.pop() if self._reserve else {}, {}
        for weight in self._weights():
            old = reserve.get(id(weight))
            if old is None or old.shape != weight.shape:
                pinned = weight.device.type == "cuda"
                old = torch.empty(weight.shape, dtype=torch.float32, pin_memory=pinned)
            source = weight.detach()
            source = source if source.device.type == "cpu" else source.float()
            copies[id(weight)] = old.copy_(source, non_blocking=True)
        return copies

    def _write(
        self,
        head: dict[str, Any],
        matrices: list[Watched],
        before: dict[int, Any],
        after: dict[int, Any],
        events: list[Any],
    ) -> None:
        """Write the file, in the thread."""
        while not all(event.query() for event in events):
            sleep(0.01)
        rows, pieces = [], []
        for watched in matrices:
            both = [self._cut(watched, copies) for copies in (before, after)]
            if any(matrix is None for matrix in both):
                continue
            size, columns = both[0].shape
            row = {"name": watched.name, "rows": size, "columns": columns}
            rows.append({**row, **{k: getattr(watched, k) for k in ("layer", "role", "heads")}})
            pieces += both
        room = os.statvfs(os.path.dirname(self._path))
        if 4 * sum(piece.numel() for piece in pieces) > room.f_bavail * room.f_frsize // FREE_PART:
            self.off = "the directory of the segments has no room for two copies"
            return
        line = {**head, "python": sys.executable, "matrices": rows}
        with replacing_file(self._path) as file:
            file.write(json.dumps(line).encode() + b"\n")
            for piece in pieces:
                start, size = piece.data_ptr(), 4 * piece.numel()
                for offset in range(0, size, PIECE):
                    file.write(ctypes.string_at(start + offset, min(PIECE, size - offset)))
        self._reserve += [before, after]

    def _cut(self, watched: Watched, copies: dict[int, Any]) -> Any:
        copy = copies.get(id(watched.weight()))
        if copy is None:
            return None
        copy = copy.T if watched.is_transposed else copy
        return (copy if watched.rows is None else copy.index_select(0, watched.rows)).contiguous()
