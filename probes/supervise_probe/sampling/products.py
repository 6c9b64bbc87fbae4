"""Classification of score products: of two activations, as in attention, or of one and a weight.

A router's scores are those of a linear layer: a matrix product with a parameter, which in the graph
of gradients is a leaf behind nothing but views and casts. Queries and keys are no leaves.

Only reads the graph that the job's own forward has made: no gradient is asked for, nothing is kept.
"""

from __future__ import annotations

import re
from typing import Any, List, Optional, Set

NODES = 32  # of the graph, between scores and the product that they come from
VIEWS = 12  # in a row, in front of a parameter
_PRODUCT = re.compile(r"[Mm]mBackward|Linear")
_VIEW = re.compile(
    r"^(T|Transpose|Permute|View|UnsafeView|Reshape\w*|Alias|Expand|Unsqueeze|Squeeze|Slice|Select"
    r"|Split\w*|AsStrided|ToCopy|Clone)Backward"
)
_LEAF = "AccumulateGrad"


def of_activations(scores: Any) -> Optional[bool]:
    """Return whether no factor of the nearest matrix products behind `scores` is a parameter.

    None where the graph does not show it: without gradients, or behind a custom function.
    """
    if scores.grad_fn is None:
        return None
    found: Optional[bool] = None
    seen: Set[Any] = set()
    waiting: List[Any] = [scores.grad_fn]
    while waiting and len(seen) < NODES:
        node = waiting.pop(0)
        if node in seen:
            continue
        seen.add(node)
        following = [each for each, _ in node.next_functions]
        name = node.name()
        if not _PRODUCT.search(name):
            waiting += [each for each in following if each is not None]
            continue
        factors = following[1:3] if "add" in name.lower() else following[:2]
        if not any(map(_is_parameter, factors)):
            return None if None in factors else True  # a frozen parameter leaves no trace
        found = False
    return found


def _is_parameter(node: Any) -> bool:
    for _ in range(VIEWS):
        if node is None:
            return False
        name: str = node.name()
        if not _VIEW.match(name):
            return name.endswith(_LEAF)
        node = node.next_functions[0][0]
    return False
