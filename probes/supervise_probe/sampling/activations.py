"""Attention, outputs of a model's blocks and of its routers, and its output logits, of one forward.

Attention logits come from what goes into SDPA and softmax. They are those after the mask:
q . k * scale, and of a hand-written attention the input of its softmax. Looked at are at most
SEQUENCES sequences, QUERY_ROWS query rows of each, evenly spread, and all heads: so the largest
logit and the count of heads over 100 are lower bounds, where a batch or a sequence is longer. Mean
and entropy are those of the rows that were looked at. In three dimensions a softmax is attention if
its input is a product of activations: a router's is as square where there are as many experts as
tokens. Without a graph of gradients, it is attention if heads are folded into the batch. What a
fused kernel of another library computes is not seen, nor a softmax that is spelt otherwise.

Of each block at most ROWS rows of its output are looked at, evenly spread; a row is the last
dimension, in a language model one token. A block that is called again is looked at once.

A router's output holds its scores over all experts: logits, or probabilities, or the scores of a
sigmoid gate, which are then made to add up to 1. Which they are is decided on the device, so that
nothing waits. The experts of a token are the router's own choice where it returns one, else its
highest scores; how many, see `structure.Router`.

Shares are those of assignments: a token that goes to two experts counts in both, and all of them
add up to 1, so that the balance is 1 when the load is even, however many a token goes to.
"""

from __future__ import annotations

import math
import re
from typing import Any, Callable, Optional, Sequence

from ..runtime.guard import hidden_from_stacklevel
from ..torch_state.structure import Router, nested_leaves

NODES = 32  # of the graph, between scores and the product that they come from
VIEWS = 12  # in a row, in front of a parameter
_PRODUCT = re.compile(r"[Mm]mBackward|Linear")
_VIEW = re.compile(
    r"^(T|Transpose|Permute|View|UnsafeView|Reshape\w*|Alias|Expand|Unsqueeze|Squeeze|Slice|Select"
    r"|Split\w*|AsStrided|ToCopy|Clone)Backward"
)
_LEAF = "AccumulateGrad"


def is_activation_product(scores: Any) -> Optional[bool]:
    """Return whether no factor of the nearest matrix products behind `scores` is a parameter.

    None where the graph does not show it: without gradients, or behind a custom function.
    """
    if scores.grad_fn is None:
        return None
    verdict: Optional[bool] = None
    visited: set[Any] = set()
    waiting: list[Any] = [scores.grad_fn]
    while waiting and len(visited) < NODES:
        node = waiting.pop(0)
        if node in visited:
            continue
        visited.add(node)
        following = [function for function, _ in node.next_functions]
        name = node.name()
        if not _PRODUCT.search(name):
            waiting += [function for function in following if function is not None]
            continue
        factors = following[1:3] if "add" in name.lower() else following[:2]
        if not any(map(_is_parameter, factors)):
            return None if None in factors else True  # a frozen parameter leaves no trace
        verdict = False
    return verdict


def _is_parameter(node: Any) -> bool:
    for _ in range(VIEWS):
        if node is None:
            return False
        name: str = node.name()
        if not _VIEW.match(name):
            return name.endswith(_LEAF)
        node = node.next_functions[0][0]
    return False


SEQUENCES, QUERY_ROWS = 4, 64
KEYS = 1 << 24  # numbers of the keys that are widened for it
CALLS = 256  # of one forward
LAYERS = 8  # with a column of their own
MASKED = -5000.0  # older models mask by -10000
FEWEST_KEYS = 9  # a query that sees fewer has no entropy worth a mean
MUCH = 100.0
HEADS = 3  # with the largest logits
HEAD, PLACE = "attn_head.", "attn_head_place."  # on their way to the host; never published
WIDE = 4096  # heads of a layer, at most
NO_ENTROPY = -1.0  # on its way to the host, where no query sees enough keys; never published

# largest per head, mean of |logit|, and per head: the sum of entropies, and of how many queries
Layer = tuple[Any, Any, Optional[tuple[Any, Any]]]


class Attention:
    """What the attention calls of one forward showed; a call is a layer.

    Args:
        batch: sizes that the batch dimension may have, from the model's input.
    """

    def __init__(self, torch: Any, batch: Sequence[int]) -> None:
        self._torch = torch
        self._batch = batch
        self.layers: list[Layer] = []

    def sdpa(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`scaled_dot_product_attention(*args, **kwargs)` was called."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        arguments = {**dict(zip(names, args)), **kwargs}
        query, key = arguments["query"].detach(), arguments["key"].detach()
        if len(self.layers) >= CALLS or query.dim() < 3:
            return
        mask, causal, scale = (arguments.get(name) for name in ("attn_mask", "is_causal", "scale"))
        length, keys = query.shape[-2], key.shape[-2]
        if mask is not None:
            mask = mask.detach().expand(*query.shape[:-1], keys)
            mask = self._four(mask)
        query, key = self._four(query), self._four(key)
        sequences, rows = self._sizes(query.shape[0], query.shape[1], length, keys)
        while sequences > 1 and sequences * key[0].numel() > KEYS:
            sequences //= 2
        rows_at = self._rows(length, rows, query.device)
        query = query[:sequences].index_select(2, rows_at).float()
        key = key[:sequences].float()
        heads, shared = query.shape[1], key.shape[1]
        grouped = query.reshape(sequences, shared, heads // shared, rows, -1)
        logits = grouped @ key.unsqueeze(2).transpose(-1, -2)
        logits = logits.reshape(sequences, heads, rows, keys)
        logits = logits * (query.shape[-1] ** -0.5 if scale is None else scale)
        visible = None
        if causal:
            visible = self._torch.arange(keys, device=rows_at.device) <= rows_at[:, None]
        elif mask is not None:
            mask = mask[:sequences].index_select(2, rows_at)
            if mask.dtype == self._torch.bool:
                visible = mask
            else:
                logits = logits + mask.float()
                visible = mask > MASKED
        self._add(logits, visible)

    def softmax(self, logits: Any, dim: Any) -> None:
        """A softmax was taken of `logits` over dimension `dim`; if it is attention, look at it."""
        if logits.dim() < 3 or dim not in (-1, logits.dim() - 1) or len(self.layers) >= CALLS:
            return
        length = logits.shape[-1]
        if length < 2 or logits.shape[-2] != length or not logits.is_floating_point():
            return
        if logits.dim() == 3 and not self._is_attention(logits):
            return
        logits = self._four(logits.detach())
        sequences, rows = self._sizes(logits.shape[0], logits.shape[1], length, length)
        rows_at = self._rows(length, rows, logits.device)
        logits = logits[:sequences].index_select(2, rows_at).float()
        self._add(logits, ~(logits <= MASKED))  # what is no number is not masked

    def values(self) -> dict[str, Any]:
        """Return the metrics as tensors of one element, in one stack; empty without attention."""
        torch, layers = self._torch, self.layers
        if not layers:
            return {}
        pad = torch.nn.utils.rnn.pad_sequence  # layers may differ in their number of heads
        heads = pad([top for top, _, _ in layers], batch_first=True, padding_value=-torch.inf)
        largest = heads.amax(1)
        over = (heads > MUCH).sum()
        names = ["max_attn_logit", "attn_logit_heads_over_100", "attn_logit_absmean"]
        mean = torch.stack([mean for _, mean, _ in layers]).mean()
        values = [largest.amax(), over.to(mean.dtype), mean]
        for index in spread_evenly(len(layers)):
            names.append(f"max_attn_logit.{index}")
            values.append(largest[index])
        for rank, (logit, position) in enumerate(zip(*_highest(heads))):
            names += [f"{HEAD}{rank}", f"{PLACE}{rank}"]
            values += [logit, position]
        entropies = [entropy for _, _, entropy in layers if entropy is not None]
        if entropies:
            names += ["attn_entropy", "attn_entropy_min"]
            values += self._entropies(entropies)
        return dict(zip(names, values))

    def _entropies(self, layers: list[tuple[Any, Any]]) -> list[Any]:
        """Return mean and minimum over the heads of which a query sees enough keys.

        Which these are is only known on the device, as the masks are.
        """
        torch = self._torch
        sums, queries = (torch.cat(layer) for layer in zip(*layers))
        has_queries = queries > 0
        share = sums / queries.clamp(min=1)
        heads = has_queries.sum()
        mean = share.masked_fill(~has_queries, 0.0).sum() / heads.clamp(min=1)
        least = share.masked_fill(~has_queries, torch.inf).amin()
        return [entropy.masked_fill(heads == 0, NO_ENTROPY) for entropy in (mean, least)]

    def _is_attention(self, logits: Any) -> bool:
        """Whether logits of three dimensions are of queries and keys, not of a router."""
        verdict = is_activation_product(logits)
        return int(logits.shape[0]) not in (1, *self._batch) if verdict is None else verdict

    def _four(self, tensor: Any) -> Any:
        """Give it the dimensions (sequences, heads, rows, columns)."""
        if tensor.dim() == 4:
            return tensor
        if tensor.dim() > 4:
            return tensor.reshape(-1, *tensor.shape[-3:])
        batch = tensor.shape[0]
        for size in self._batch:
            if size and batch % size == 0 and size != tensor.shape[-2]:
                return tensor.reshape(size, batch // size, *tensor.shape[-2:])
        return tensor.unsqueeze(0)

    def _sizes(self, batch: int, heads: int, length: int, keys: int) -> tuple[int, int]:
        sequences, rows = min(SEQUENCES, batch), min(QUERY_ROWS, length)
        while sequences > 1 and sequences * heads * rows * keys > ELEMENTS:
            sequences //= 2
        while rows > 8 and sequences * heads * rows * keys > ELEMENTS:
            rows //= 2
        return sequences, rows

    def _rows(self, length: int, rows: int, device: Any) -> Any:
        """Return `rows` query rows, evenly spread, the first and the last among them."""
        row_index = self._torch.arange(rows, device=device)
        return row_index if rows == length else row_index * (length - 1) // max(1, rows - 1)

    def _add(self, logits: Any, visible: Any) -> None:
        torch = self._torch
        if visible is None:
            visible = torch.ones((), dtype=torch.bool, device=logits.device)
        visible = visible.expand(logits.shape)
        masked = logits.masked_fill(~visible, -torch.inf)
        absolute = logits.masked_fill(~visible, 0.0).abs()
        count = visible.sum(-1)
        top = masked.amax((0, 2, 3))
        mean = absolute.sum() / count.sum()
        self.layers.append((top, mean, self._entropy(masked, visible, count)))

    def _entropy(self, masked: Any, visible: Any, count: Any) -> Optional[tuple[Any, Any]]:
        torch = self._torch
        if masked.shape[-1] < FEWEST_KEYS:
            return None
        logs = torch.log_softmax(masked, -1)
        terms = (logs.exp() * logs).masked_fill(~visible, 0.0)
        share = -terms.sum(-1) / count.clamp(min=2).log()
        enough = count >= FEWEST_KEYS
        share = share.masked_fill(~enough, 0.0)
        return share.sum((0, 2)), enough.sum((0, 2))


def _highest(heads: Any) -> tuple[Any, Any]:
    """Return the largest logits of single heads, and where: layer * WIDE + head.

    Where is only known on the device.
    """
    logits, head_index = heads.flatten().topk(min(HEADS, heads.numel()))
    width = heads.shape[1]
    places = head_index.div(width, rounding_mode="floor") * WIDE + head_index % width
    return logits.unbind(), places.to(logits.dtype).unbind()


def spread_evenly(count: int, limit: int = LAYERS) -> list[int]:
    """Return at most `most` numbers below `count`, evenly spread, first and last among them."""
    if count <= limit:
        return list(range(count))
    return [i * (count - 1) // (limit - 1) for i in range(limit)]


# Bounds of KeyGradients. Our CPU kernels left 4e-7 and 1.4e-3, with logits of 100 and more 7e-6 and
# 2e-3; a bias of 64 bits of bfloat16 leaves 7e-2.
EXACT, ROUNDED = 1e-4, 1e-2


class KeyGradients:
    """Sums over the sequence of the gradients of attention's keys, of one forward.

    Softmax does not change when all its inputs grow by the same. So in exact arithmetic the
    gradients of the keys add up to zero, whatever the weights and the mask are, and what is left
    is rounding. A kernel whose backward is biased breaks that at once, long before the loss shows
    it. They are looked at where they leave the kernel, and nothing in the graph changes. Where all
    that is left of the gradients is rounding, as of a saturated head, so is their sum: the median
    over heads counts. A look never waits for a device.

    Args:
        run: calls a function for the sampled set.
    """

    def __init__(self, torch: Any, run: Callable[..., Any]) -> None:
        self._torch, self._run = torch, run
        self._calls = 0
        self.ratios: list[Any] = []

    def watch(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """`scaled_dot_product_attention(*args, **kwargs)` returned `output`."""
        key = args[1] if len(args) > 1 else kwargs["key"]
        node = self._kernel(output, key) if self._calls < CALLS and key.dim() > 2 else None
        if node is None or key.shape[-2] < 2:
            return
        self._calls += 1
        exact = output.device.type == "cpu" and output.dtype in (
            self._torch.float32,
            self._torch.float64,
        )
        exact = exact and self._torch.get_float32_matmul_precision() == "highest"
        bound = EXACT if exact else ROUNDED
        node.register_hook(lambda gradients, _: self._run(self._saw, gradients[1], bound))

    def _kernel(self, output: Any, key: Any) -> Any:
        """Return the graph's node of a fused kernel or custom function that takes the key."""
        node = output.grad_fn
        for _ in range(VIEWS):
            if node is None or len(node.next_functions) != 1:
                break
            node = node.next_functions[0][0]
        if node is None or len(node.next_functions) < 3:
            return None
        takes_key = key.grad_fn is not None and node.next_functions[1][0] is key.grad_fn
        return node if takes_key or "Attention" in node.name() else None

    def _saw(self, gradient: Any, bound: float) -> None:
        if gradient is None or gradient.dim() < 3 or len(self.ratios) >= self._calls:
            return  # or a graph that was retained is gone through once more
        finest = self._torch.finfo(gradient.dtype)
        length, size = gradient.shape[-2:]
        rounding = length * size * finest.smallest_normal * finest.eps / 2  # of subnormal numbers
        rows = gradient[:SEQUENCES].float()
        left = (rows.sum(-2).abs().sum(-1) - rounding).clamp(min=0.0)
        ratio = left / rows.abs().sum((-2, -1)).clamp(min=self._torch.finfo(rows.dtype).tiny)
        self.ratios.append((ratio / bound).flatten().nan_to_num(0.0, 0.0, 0.0))

    def values(self) -> dict[str, Any]:
        """Return the metric as a tensor of one element; empty where no backward came."""
        if not self.ratios:
            return {}
        ratios = [ratio.to(self.ratios[0].device) for ratio in self.ratios]
        return {"key_gradient_sum": self._torch.cat(ratios).median()}


Look = Callable[..., None]


class StandIns:
    """The four functions.

    Args:
        sdpa: called with `(args, kwargs, output)` after a call of scaled_dot_product_attention.
        softmax: called with `(input, dim)` after a softmax; once, however it was spelt.
        quiet: whether a look must not be taken now.
    """

    def __init__(self, torch: Any, sdpa: Look, softmax: Look, quiet: Callable[[], bool]) -> None:
        self._torch = torch
        self._quiet = quiet
        self._compiling = torch.compiler.is_compiling
        self._foreign = torch.overrides.has_torch_function
        self._inside = False
        functional = torch.nn.functional

        def saw(args: tuple[Any, ...], kwargs: Any, _: Any) -> None:
            names = ("input", "dim")
            arguments = {**dict(zip(names, args)), **kwargs}
            softmax(args[0] if args else arguments["input"], arguments.get("dim"))

        self._places: list[tuple[Any, str, Any, Any]] = []
        for home, name, look in (
            (functional, "scaled_dot_product_attention", sdpa),
            (functional, "softmax", saw),
            (torch, "softmax", saw),
            (torch.Tensor, "softmax", saw),
        ):
            original = getattr(home, name)
            self._places.append((home, name, original, self._stand_in(original, look)))
        self._inherited = "softmax" not in vars(torch.Tensor)

    def install(self) -> None:
        """Put them in place."""
        for home, name, _, stand_in in self._places:
            setattr(home, name, stand_in)

    def uninstall(self) -> None:
        """Take them away; what somebody else put there since stays."""
        for home, name, original, stand_in in self._places:
            if vars(home).get(name) is not stand_in:
                continue
            if home is self._torch.Tensor and self._inherited:
                delattr(home, name)
            else:
                setattr(home, name, original)

    def close(self) -> None:
        """Take them away for good; they refer to each other."""
        self.uninstall()
        self._places.clear()

    def _stand_in(self, original: Callable[..., Any], look: Look) -> Callable[..., Any]:
        @hidden_from_stacklevel
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if self._inside or self._compiling() or self._quiet():
                return original(*args, **kwargs)
            if self._foreign((*args, *kwargs.values())):
                self.uninstall()
                try:
                    return original(*args, **kwargs)
                finally:
                    self.install()
            self._inside = True  # one spelling calls another
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside = False
            look(args, kwargs, result)
            return result

        return stand_in


ROWS = 256
LOGITS = 1 << 20  # numbers of the output that are looked at
OUTLIER = 6.0
PERCENTILES = 50, 99
BLOCKS = 4  # whose percentiles get columns
ENTROPIES = 4  # of so many rows of logits one has its entropy taken


class Activations:
    """What the blocks of one forward put out."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._blocks: dict[int, tuple[Any, Any, Any]] = {}
        self.logz: Optional[Any] = None
        self._entropy: Optional[Any] = None

    def block(self, index: int, output: Any) -> None:
        """Block `index` returned `output`."""
        tensor = _floating(self._torch, output)
        if tensor is None or index in self._blocks:
            return
        rows = sample_rows(tensor.detach(), ROWS).float()
        squares = rows.square().mean(-1)
        rms = squares.mean().sqrt()
        self._blocks[index] = rms, (rows.abs() > OUTLIER * rms).float().mean(), squares

    def output(self, output: Any, vocabularies: set[int]) -> None:
        """The model returned `output`: its logits, if it is as wide as one of its vocabularies."""
        tensor = _floating(self._torch, output)
        if self.logz is None and tensor is not None and int(tensor.shape[-1]) in vocabularies:
            self.logits(tensor)

    def logits(self, logits: Any) -> None:
        """These are logits; classes are in the last dimension, in dimension 1 for a loss."""
        width = int(logits.shape[-1])
        rows = sample_rows(logits.detach(), max(16, min(ROWS, LOGITS // width)))
        rows = rows.float()
        logz = rows.logsumexp(-1)
        self.logz = logz.mean()
        few = rows[::ENTROPIES].clamp(min=-1e4)  # what is masked has no share, and no part in it
        mean = self._torch.linalg.vecdot(few.softmax(-1), few)
        self._entropy = (logz[::ENTROPIES] - mean).mean()

    def values(self) -> dict[str, Any]:
        """Return the metrics as tensors of one element."""
        values: dict[str, Any] = {}
        if self.logz is not None:
            values = {"logz_mean": self.logz, "token_entropy": self._entropy}
        if self._blocks:
            order = sorted(self._blocks)
            rms = self._torch.stack([self._blocks[i][0] for i in order])
            values["residual_rms"] = rms.amax()
            outliers = self._torch.stack([self._blocks[i][1] for i in order])
            values["activation_outlier_rate"] = 100.0 * outliers.amax()
            for block in spread_evenly(len(order)):
                values[f"residual_rms.{order[block]}"] = rms[block]
            values.update(self._percentiles([order[i] for i in spread_evenly(len(order), BLOCKS)]))
        return values

    def _percentiles(self, indices: list[int]) -> dict[str, Any]:
        squares = [self._blocks[index][2] for index in indices]
        pad = self._torch.nn.utils.rnn.pad_sequence
        rows = pad(squares, batch_first=True, padding_value=float("inf")).sort()[0].sqrt()
        return {
            f"residual_rms_p{p}.{index}": row[(len(square) - 1) * p // 100]
            for index, square, row in zip(indices, squares, rows)
            for p in PERCENTILES
        }


def _floating(torch: Any, output: Any) -> Optional[Any]:
    """Return the first plain floating tensor in `output` that has rows."""
    for item in nested_leaves(output):
        if type(item) is torch.Tensor and item.is_floating_point() and item.dim() > 1:
            return item
    return None


def sample_rows(tensor: Any, limit: int) -> Any:
    """Return at most so many rows, evenly spread; a row is the last dimension."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat[:: -(-flat.shape[0] // limit)] if flat.shape[0] > limit else flat


ELEMENTS = 1 << 22  # scores of one router that are looked at
SMALL = 1e-30


class Routing:
    """What the routers of one forward did."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        # per router: entropy of the load, balance, entropy of a token; dropped and routed tokens
        self._found: dict[str, tuple[Any, Any, Any]] = {}
        self._dropped: list[tuple[Any, float]] = []

    def router(self, router: Router, output: Any) -> None:
        """`router` returned `output`."""
        torch, experts = self._torch, router.experts
        scores, choices = self._read(router, output)
        if scores is None or router.name in self._found:
            return
        tokens = scores.shape[0]
        stride = -(-tokens * experts // ELEMENTS)
        scores = scores[::stride].float()
        best = choices is None
        choices = scores.topk(router.top_k, -1).indices if best else choices[::stride]
        shares = self._probabilities(scores)
        numbers = torch.arange(experts, device=scores.device)
        counts = sum((column[:, None] == numbers).sum(0) for column in choices.unbind(-1))
        load = counts.float() / choices.numel()
        self._found[router.name] = (
            _entropy(load) / math.log(experts),
            experts * (load * shares.mean(0)).sum(),
            _entropy(shares).mean() / math.log(experts),
        )
        room = router.capacity
        if router.factor is not None:
            room = math.ceil(router.factor * tokens * choices.shape[-1] / experts)
        if room is not None and stride == 1:
            self._dropped.append(((counts - room).clamp(min=0).sum().float(), choices.numel()))

    def values(self) -> dict[str, Any]:
        """Return the metrics as tensors of one element."""
        if not self._found:
            return {}
        load, balance, token = (self._torch.stack(values) for values in zip(*self._found.values()))
        results = {
            "moe_util_entropy": load.amin(),
            "moe_load_balance_loss": balance.amax(),
            "router_token_entropy": token.mean(),
            "router_token_entropy_min": token.amin(),
            "router_token_entropy_max": token.amax(),
        }
        for layer in spread_evenly(len(token)):
            results[f"router_token_entropy.{layer}"] = token[layer]
        if self._dropped:
            routed = sum(number for _, number in self._dropped)
            dropped = self._torch.stack([number for number, _ in self._dropped]).sum()
            results["moe_drop_rate"] = 100.0 * dropped / routed
        return results

    def _read(self, router: Router, output: Any) -> tuple[Any, Any]:
        scores = experts = None
        for item in nested_leaves(output):
            if type(item) is not self._torch.Tensor or item.dim() < 2:
                continue
            is_integer = not item.is_floating_point() and item.dtype != self._torch.bool
            if scores is None and item.is_floating_point() and item.shape[-1] == router.experts:
                scores = item.detach().reshape(-1, router.experts)
            elif experts is None and is_integer and item.shape[-1] < router.experts:
                experts = item.detach().reshape(-1, item.shape[-1])
        if scores is not None and experts is not None and len(experts) != len(scores):
            experts = None
        return scores, experts

    def _probabilities(self, scores: Any) -> Any:
        """Return the scores as shares that add up to 1; logits by their softmax."""
        positive = (scores >= 0).all() & (scores <= 1).all()
        total = scores.sum(-1, keepdim=True).clamp(min=SMALL)
        return self._torch.where(positive, scores / total, scores.softmax(-1))


def _entropy(shares: Any) -> Any:
    return -(shares * shares.clamp(min=SMALL).log()).sum(-1)
