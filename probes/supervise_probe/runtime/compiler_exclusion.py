"""Keeps torch.compile out of the probe's own functions, for next to nothing where none is at work.

`torch._disable_dynamo` alone would do, at 20 us for each call behind a forward, when the caches are
cold. So it is asked first whether a compiler watches this thread at all.

Source: torch/_compile.py and torch/_dynamo/eval_frame.py.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

from .warning_stacklevel import uncounted

Function = Callable[..., Any]
Hidden = Callable[..., Function]


def hidden(
    torch: Any, function: Function, recursive: bool = True, plain: Optional[Function] = None
) -> Function:
    """Keep torch.compile out of `function`, and if `recursive` out of what it calls.

    Args:
        plain: does the same and asks for no compiler again; run where none watches.
    """
    disable = getattr(torch, "_disable_dynamo", None)
    if disable is None:
        return function
    slow: Function = disable(function, recursive=recursive)
    watcher: Optional[Callable[[], Any]] = getattr(
        torch._C._dynamo.eval_frame, "get_eval_frame_callback", None
    )
    if watcher is None:
        return slow

    unwatched = plain or function

    @uncounted
    def quick(*args: Any, **kwargs: Any) -> Any:
        return unwatched(*args, **kwargs) if watcher() is None else slow(*args, **kwargs)

    _skip(torch._C._dynamo.eval_frame, quick)
    vars(quick)["_torchdynamo_disable"] = True  # torch's own mark: not to be inlined
    return quick


def as_it_is(function: Function) -> Function:
    """Stand for `hidden` where no compiler watches."""
    return function


def _skip(compiler: Any, function: Function) -> None:
    """Have the compiler run the frames of `function` as they are. Once for all of one `def`."""
    code = function.__code__
    if code in _skipped:
        return
    _skipped.add(code)
    try:
        if hasattr(compiler, "skip_code"):  # an older torch
            compiler.skip_code(code)
        else:  # as torch._dynamo.eval_frame.skip_code does
            action = compiler._FrameAction
            strategy = compiler._FrameExecStrategy(action.SKIP, action.DEFAULT)
            compiler.set_code_exec_strategy(code, strategy)
    except (AttributeError, TypeError):  # another version: then such a frame is traced once
        pass


_skipped: "set[Any]" = set()
