"""Stand-ins for SDPA and softmax, in place for the length of one sampled forward.

They are put up and taken down, and do not stay: a function that stands for `F.softmax` for good
would be pickled with models, break TorchScript, and fail code that asks `func is torch.softmax`,
as tensor subclasses and torch's own attention biases do, also when compiled. Nothing compiled runs
while they stand (`watch.py` sees to that), so no guard of torch.compile ever meets one.

Tensor subclasses and function modes get the originals.
"""

from __future__ import annotations

from typing import Any, Callable, List, Tuple

from ..runtime.warning_stacklevel import uncounted

Look = Callable[..., None]


class StandIns:
    """The four functions.

    Args:
        sdpa: called with `(args, kwargs)` after a call of scaled_dot_product_attention.
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

        def saw(args: Tuple[Any, ...], kwargs: Any) -> None:
            names = ("input", "dim")
            given = {**dict(zip(names, args)), **kwargs}
            softmax(args[0] if args else given["input"], given.get("dim"))

        self._places: List[Tuple[Any, str, Any, Any]] = []
        for home, name, look in (
            (functional, "scaled_dot_product_attention", sdpa),
            (functional, "softmax", saw),
            (torch, "softmax", saw),
            (torch.Tensor, "softmax", saw),
        ):
            original = getattr(home, name)
            self._places.append((home, name, original, self._stand_in(original, look)))
        self._inherited = "softmax" not in vars(torch.Tensor)

    def up(self) -> None:
        """Put them in place."""
        for home, name, _, stand_in in self._places:
            setattr(home, name, stand_in)

    def down(self) -> None:
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
        self.down()
        self._places.clear()

    def _stand_in(self, original: Callable[..., Any], look: Look) -> Callable[..., Any]:
        @uncounted
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if self._inside or self._compiling() or self._quiet():
                return original(*args, **kwargs)
            if self._foreign((*args, *kwargs.values())):
                self.down()
                try:
                    return original(*args, **kwargs)
                finally:
                    self.up()
            self._inside = True  # one spelling calls another
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside = False
            look(args, kwargs)
            return result

        return stand_in
