"""Gate of the patched functions: closed, they only call the original."""

from __future__ import annotations

from threading import get_ident
from types import CodeType
from typing import Any, Callable, Dict, Optional, TypeVar


class Gate:
    """One for the life of the process: the patches hold it.

    Attributes:
        on: false once the probe is off for good.
        inside: an optimizer's step is running. in_backward, in_forward: likewise.
        thread: the one that is watched, None before any backward.
        has_cuda: this torch was built for such devices.
    """

    def __init__(self, torch: Any) -> None:
        self.on = True
        self.has_cuda = bool(torch.version.cuda or getattr(torch.version, "hip", None))
        self._torch = torch
        self._transforming = getattr(torch._C, "_are_functorch_transforms_active", bool)
        self._tracing = torch._C._get_tracing_state
        self._set_grad_enabled = torch._C._set_grad_enabled
        self._is_grad_enabled = torch.is_grad_enabled
        self.reset()

    def reset(self) -> None:
        """Stand as in a process that has not trained yet."""
        self.inside = self.in_backward = self.in_forward = False
        self.thread: Optional[int] = None

    def absent(self) -> bool:
        """Whether a hook must do nothing where no functorch transform can be at work.

        Off; in another thread than the one that trains; while a tracer or a capture is at work.
        """
        return (
            not self.on
            or (self.thread is not None and get_ident() != self.thread)
            or self._tracing() is not None
            or (self.has_cuda and self._captures())
        )

    def _captures(self) -> bool:
        cuda = self._torch.cuda
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())

    def off_duty(self) -> bool:
        """Whether a hook must do nothing: as `absent`, or inside a functorch transform."""
        return self.absent() or bool(self._transforming())

    def without_grad(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` with gradients off. As `torch.no_grad`, at a tenth of its cost."""
        enabled = self._is_grad_enabled()
        self._set_grad_enabled(False)
        try:
            return function(*args)
        finally:
            self._set_grad_enabled(enabled)


NAME = " (not importlib._bootstrap)"  # behind the file's own, in tracebacks too

Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])

_codes: Dict[CodeType, CodeType] = {}  # one for all functions of one `def`


def uncounted(function: Wrapped) -> Wrapped:
    """Have `function`, which stands around something of the job's or of torch's, not counted."""
    code: CodeType = function.__code__
    if code not in _codes:
        _codes[code] = code.replace(co_filename=code.co_filename + NAME)
    function.__code__ = _codes[code]
    return function


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
