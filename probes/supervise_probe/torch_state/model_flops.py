"""Operations that a model needs for one token, without those that an implementation repeats.

6 for each weight that is multiplied (2 forward, 2 for the gradient of its input, 2 for its own; 4
where it is frozen), and 12 L H Q T for attention over T positions: nothing is taken off for a
causal mask, nothing added for what is computed twice. Source: PaLM, arXiv:2204.02311, appendix B.

Read from the modules: weights of two and more dimensions, but for tables that are looked up and
normalisations; of experts the share that a token goes to. An embedding that is the output's matrix
too counts once, where a module says so. Convolutions use a weight many times, and an encoder with
a decoder has two numbers of tokens: for both there is no count.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from .structure import Router, Structure

_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_LOOKED_UP = re.compile(r"pos|emb|token", re.IGNORECASE)
_HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "heads", "nhead")
_WIDTH_OF_HEAD = (
    "head_dim",
    "attention_head_size",
    "head_size",
    "d_head",
    "key_value_proj_dim",
    "d_kv",
)
_WIDTH = ("all_head_size", "embed_dim", "n_embd", "hidden_size", "d_model", "embed_size", "dim")
_SPLIT = re.compile(r"tp|tensor", re.IGNORECASE)  # names of mesh dimensions that split a matrix


class ModelFlops(NamedTuple):
    """What one model needs.

    Attributes:
        per_token: operations for one token, attention apart.
        per_pair: for each pair of a token and a position that it attends to: 12 L H Q.
        layers: how many attention modules were counted.
        why_not: why there is no count, "" if there is one.
    """

    per_token: float
    per_pair: float
    layers: int
    why_not: str = ""


def count(torch: Any, roots: Iterable[Any]) -> ModelFlops:
    """Count the operations of forward and backward of the models `roots` together."""
    weights: Dict[int, float] = {}
    widths: List[float] = []
    for root in roots:
        shares = _shares(root, Structure(torch, root).routers)
        config = getattr(root, "config", None)
        if getattr(config, "is_encoder_decoder", False) is True:
            return ModelFlops(0, 0, 0, "an encoder and a decoder see different numbers of tokens")
        for module in root.modules():
            if isinstance(module, torch.nn.modules.conv._ConvNd):
                return ModelFlops(0, 0, 0, "convolutions use a weight many times")
            weights.update(_of_module(torch, module, shares))
        widths += _attention(torch, root)
    if not weights:
        return ModelFlops(0, 0, 0, "no weight matrix is to be seen")
    return ModelFlops(sum(weights.values()), 12.0 * sum(widths), len(widths))


def _of_module(torch: Any, module: Any, shares: Dict[int, float]) -> Dict[int, float]:
    """Return the operations for each weight, by its id, that this module itself multiplies."""
    if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
        return {}
    if "Norm" in type(module).__name__:
        return {}
    found = {}
    for name, weight in module._parameters.items():
        if weight is None or weight.dim() < 2 or "bias" in name:
            continue
        if weight.dim() > 2 and weight.shape[0] == 1:  # such as a position's vector
            continue
        if name != "weight" and _LOOKED_UP.search(name):
            continue
        each = 6.0 if weight.requires_grad else 4.0
        found[id(weight)] = each * _size(weight) * shares.get(id(weight), 1.0)
    return found


def _size(weight: Any) -> float:
    """Return how many elements of it this rank multiplies with; a sharded one is gathered first."""
    size = float(weight.numel())
    mesh = getattr(weight, "device_mesh", None)
    for place, name in enumerate(getattr(mesh, "mesh_dim_names", None) or ()):
        if mesh is not None and _SPLIT.search(name) and weight.placements[place].is_shard():
            size /= mesh.size(place)
    return size


def _shares(root: Any, routers: Iterable[Router]) -> Dict[int, float]:
    """Return for each weight of an expert, by id, the share of all tokens that it works on."""
    shares: Dict[int, float] = {}
    for router in routers:
        parent = root.get_submodule(router.name.rpartition(".")[0])
        experts = [p for p in parent._parameters.values() if _stacked(p, router.experts)]
        for child in parent.children():
            apart = sum(1 for _ in child.children()) == router.experts
            if apart or any(_stacked(p, router.experts) for p in child.parameters()):
                experts += child.parameters()
        share = min(1.0, router.chosen / router.experts)
        shares.update((id(p), share) for p in experts)
    return shares


def _stacked(weight: Any, experts: int) -> bool:
    return weight is not None and weight.dim() == 3 and int(weight.shape[0]) == experts


def _attention(torch: Any, root: Any) -> List[float]:
    """Return the width of all heads together for each innermost attention module."""
    found: List[Tuple[str, float]] = []
    for name, module in root.named_modules():
        width = _width(torch, module) if name else None
        if width:
            found.append((name, width))
    names = [name for name, _ in found]
    inner = {name for name in names if any(other.startswith(name + ".") for other in names)}
    return [width for name, width in found if name not in inner]


def _width(torch: Any, module: Any) -> Optional[float]:
    if isinstance(module, torch.nn.MultiheadAttention):
        return float(module.embed_dim)
    named = _ATTENTION.search(type(module).__name__) is not None
    config = getattr(module, "config", None) if named else None
    heads = _number(module, config, _HEADS)
    if heads is None or not any(True for _ in module.children()):
        return None
    head = _number(module, config, _WIDTH_OF_HEAD)
    if head is not None:
        return heads * head
    linear = [m for m in module.children() if isinstance(m, torch.nn.Linear)]
    # The last one mostly puts the heads together: its input is as wide as all of them.
    return float(linear[-1].in_features) if linear else _number(module, config, _WIDTH)


def _number(module: Any, config: Any, names: Tuple[str, ...]) -> Optional[float]:
    for home in (vars(module), getattr(config, "__dict__", {})):
        for name in names:
            value = home.get(name)
            if type(value) is int and value > 0:
                return float(value)
    return None
