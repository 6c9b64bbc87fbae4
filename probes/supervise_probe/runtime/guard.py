"""Gate and guard of the probe inside the job.

Behind a closed gate patched functions only call the original. Under the guard no piece of the probe
raises, and what it costs is known.

A piece that fails twice, or is too dear over a window of steps, is switched off and reported. One
step in four is weighed, mostly as a whole, sometimes by pieces; in the others no clock is read.
Exceptions that are not the probe's pass through: KeyboardInterrupt and SystemExit, and whatever a
signal handler of the job raised while the probe happened to run.

Knows nothing of torch and of what the pieces do. Costs are thread CPU time, since wall time on a
busy machine measures the neighbours; to ask for it is a system call, so that a tenth of what is
measured of a step of 50 ms is the measuring.
"""

from __future__ import annotations

import signal
from threading import get_ident
from time import thread_time_ns
from types import CodeType
from typing import Any, Callable, Optional, TypeVar

WINDOW = 61  # steps over which a cost is judged by its median; odd, see WEIGH_EVERY
# Steps between two that are timed: a look at a cold clock costs 5 us. Each window begins at another
# remainder: weighed on even steps only, what is sampled every 10 or 50 would count twice.
WEIGH_EVERY = 4
PIECES_EVERY = 16  # steps between two in which each piece is timed: thirty looks
PIECES_AT = 9
STRIKES = 2
NONE, WHOLE, PIECES = "none", "whole", "pieces"


class Part:
    """One piece of the probe.

    Attributes:
        share: what it may cost, as a share of the step time.
        floor_ns: what it may cost in any case; a step of a toy takes less than a clock's tick.
        relax: called instead of switching it off when it is too dear; true if it found a cheaper
            way.
        allowed: returns what it may cost in a step of so many ns, of a part that can be called less
            often; in place of `share` and `floor_ns`.
        vital: the probe as a whole goes off with it.
        excused: not switched off for its cost: the supervisor asked for it, for a while.
    """

    def __init__(
        self,
        name: str,
        share: float,
        floor_ns: int,
        relax: Optional[Callable[[], bool]],
        vital: bool,
    ) -> None:
        self.name = name
        self.share = share
        self.floor_ns = floor_ns
        self.relax = relax
        self.allowed: Optional[Callable[[int], float]] = None
        self.vital = vital
        self.on = True
        self.excused = False
        self.reason = ""
        self.errors = 0
        self.spent_ns = 0
        self.costs: list[int] = []


Calls = list[tuple[Part, Callable[..., Any]]]


class Guard:
    """All pieces of one process.

    Args:
        off: called with `(part, reason)` when a piece is switched off.
        torch: a dispatch mode of the job's, such as a counter of FLOPs, sees nothing of what runs.

    Attributes:
        newest_ns: what all pieces spent in the newest step that was weighed as a whole.
        weighed_ns: the same of the last step, None where that was not weighed.
        fixed_ns: what a step costs without what can be called less often, median of a window.
        core: the piece without which nothing is measured.
        blind: costs are not looked at for now, since a profiler makes everything dear.
    """

    def __init__(self, off: Callable[[Part, str], None], torch: Any = None) -> None:
        self._torch = torch
        self._modes = getattr(getattr(torch, "_C", None), "_len_torch_dispatch_stack", int)
        self.parts: dict[str, Part] = {}
        self._off = off
        self._steps_ns: list[int] = []
        self._inner_ns = 0  # spent in parts that ran inside the part that is running
        self._total_ns = 0  # spent in all parts in the step that is weighed
        self._clocks = NONE  # how much of this step is timed from here on
        self.newest_ns = 0
        self.weighed_ns: Optional[int] = None
        self.fixed_ns = 0
        self._wholes: list[int] = []
        self.blind = False
        self.core = self.part("core", vital=True)

    def part(
        self,
        name: str,
        *,
        share: float = 0.02,
        floor_us: int = 1000,
        relax: Optional[Callable[[], bool]] = None,
        vital: bool = False,
    ) -> Part:
        """Return the piece of that name, made on first use."""
        if name not in self.parts:
            self.parts[name] = Part(name, share, floor_us * 1000, relax, vital)
        return self.parts[name]

    def run(self, part: Part, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)` for `part`; None if the part is off or the call failed."""
        if not part.on:
            return None
        if self._modes():
            function, args = self._without_modes, (function, *args)
        clocks = self._clocks
        if clocks is PIECES:
            return self._run_timed(part, function, args)
        if clocks is WHOLE:
            self._clocks = NONE  # for what runs inside
            began = thread_time_ns()
        try:
            return function(*args)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            self.failed(part, error)
            return None
        finally:
            if clocks is WHOLE:
                self._total_ns += thread_time_ns() - began
                self._clocks = WHOLE

    def _without_modes(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` with the job's dispatch modes taken off; torch's own kinds stay.

        As torch's `_disable_current_modes`, which imports the compiler, and takes off all.
        """
        modes: list[Any] = []
        stack, top = self._torch.utils._python_dispatch, self._torch._C._get_dispatch_stack_at
        try:
            while self._modes():
                if getattr(top(self._modes() - 1), "_mode_key", None) is not None:
                    break
                modes.append(stack._pop_mode())
            return function(*args)
        finally:
            for mode in reversed(modes):
                stack._push_mode(mode)

    def run_while_waiting(self, part: Part, function: Callable[..., Any], *args: Any) -> Any:
        """As `run`, where the job waits for others: what that takes is no cost of the part."""
        clocks, self._clocks = self._clocks, NONE
        try:
            return self.run(part, function, *args)
        finally:
            self._clocks = clocks

    def _run_timed(self, part: Part, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        outer, self._inner_ns = self._inner_ns, 0
        began = thread_time_ns()
        try:
            return function(*args)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            self.failed(part, error)
            return None
        finally:
            took = thread_time_ns() - began
            own_ns = took - self._inner_ns
            part.spent_ns += own_ns
            self._inner_ns = outer + took

    def run_all(self, calls: Calls, *args: Any) -> None:
        """Call each of `calls` for its part, as `run` would. To be called inside a `run`."""
        if self._clocks is not PIECES:
            pending = iter(calls)
            while True:  # again only after an error: a `try` for each call would cost more
                part = None
                try:
                    for part, function in pending:
                        if part.on:
                            function(*args)
                    return
                except Exception as error:
                    if part is None or is_from_signal_handler(error):
                        raise
                    self.failed(part, error)
        outer, self._inner_ns = self._inner_ns, 0
        began = start = thread_time_ns()
        for part, function in calls:
            if not part.on:
                continue
            try:
                function(*args)
            except Exception as error:
                if is_from_signal_handler(error):
                    raise
                self.failed(part, error)
            now = thread_time_ns()
            own_ns = now - began - self._inner_ns
            part.spent_ns += own_ns
            self._inner_ns = 0
            began = now
        self._inner_ns = outer + began - start

    def failed(self, part: Part, error: BaseException) -> None:
        """Count an error of `part`; the second one switches it off."""
        part.errors += 1
        if part.errors >= STRIKES:
            self.switch_off(part, describe_error(error))

    def switch_off(self, part: Part, reason: str) -> None:
        """Switch `part` off for the rest of the run, and say why."""
        if part.on:
            part.on = False
            part.reason = reason
            self._off(part, reason)

    def finish_step_timing(self) -> None:
        """A step is over, and no part is running: begin to weigh the next, if it is its turn."""
        clocks, self._clocks = self._clocks, NONE
        self.weighed_ns = None
        if self.blind:
            return
        if clocks is WHOLE:
            self.newest_ns = self.weighed_ns = self._total_ns
            self._wholes.append(self._total_ns)
            return
        if clocks is PIECES:
            for part in self.parts.values():
                part.costs.append(part.spent_ns)
        elif len(self._steps_ns) % WEIGH_EVERY == 1:
            self._clocks = WHOLE
            self._total_ns = self._inner_ns = 0
            if len(self._steps_ns) % PIECES_EVERY == PIECES_AT:
                self._clocks = PIECES
                for part in self.parts.values():
                    part.spent_ns = 0

    def judge_costs(self, step_ns: int) -> None:
        """A step of `step_ns` ended: every WINDOW steps, weigh costs."""
        if self.blind:
            return
        self._steps_ns.append(step_ns)
        if len(self._steps_ns) < WINDOW:
            return
        step = _median(self._steps_ns)
        rare = sum(_median(part.costs) for part in self.parts.values() if part.allowed)
        self.fixed_ns = max(0, _median(self._wholes) - rare)
        self._steps_ns.clear()
        self._wholes.clear()
        for part in list(self.parts.values()):
            cost = _median(part.costs)
            part.costs.clear()
            if part.excused:
                continue
            allowed = max(part.share * step, part.floor_ns)
            if part.allowed is not None:
                allowed = part.allowed(step)
            if part.on and not part.vital and cost > allowed and not (part.relax and part.relax()):
                self.switch_off(
                    part, f"cost {cost / 1e6:.2f} ms a step, {allowed / 1e6:.2f} ms are allowed"
                )

    def reset(self) -> None:
        """Forget what was spent: a forked child starts at nothing."""
        self._steps_ns.clear()
        self._wholes.clear()
        self.blind, self.weighed_ns = False, None
        self._inner_ns = self._total_ns = 0
        self._clocks = NONE
        for part in self.parts.values():
            part.spent_ns = 0
            part.costs.clear()


def describe_error(error: BaseException) -> str:
    """Return the error in one line, with the place where it arose."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    location = ""
    if trace is not None:
        code = trace.tb_frame.f_code
        location = f" ({code.co_filename.rpartition('/')[2]}:{trace.tb_lineno})"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}{location}"


def _median(values: list[int]) -> int:
    return sorted(values)[len(values) // 2] if values else 0


def is_from_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler of the job raised `error`: it is not the probe's to catch."""
    handlers: set[CodeType] = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        handler = getattr(handler, "__func__", handler)
        code = getattr(handler, "__code__", None)
        if code is None and callable(handler):
            code = getattr(type(handler).__dict__.get("__call__"), "__code__", None)
        if code is not None:
            handlers.add(code)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


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

    def must_bypass(self) -> bool:
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

    def must_skip_hook(self) -> bool:
        """Whether a hook must do nothing: as `must_bypass`, or inside a functorch transform."""
        return self.must_bypass() or bool(self._transforming())

    def call_without_grad(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` with gradients off. As `torch.no_grad`, at a tenth of its cost."""
        enabled = self._is_grad_enabled()
        self._set_grad_enabled(False)
        try:
            return function(*args)
        finally:
            self._set_grad_enabled(enabled)


NAME = " (not importlib._bootstrap)"  # behind the file's own, in tracebacks too

Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])

_codes: dict[CodeType, CodeType] = {}  # one for all functions of one `def`


def hidden_from_stacklevel(function: Wrapped) -> Wrapped:
    """Have `function`, which stands around something of the job's or of torch's, not counted."""
    code: CodeType = function.__code__
    if code not in _codes:
        _codes[code] = code.replace(co_filename=code.co_filename + NAME)
    function.__code__ = _codes[code]
    return function


Function = Callable[..., Any]
Hidden = Callable[..., Function]


def hide_from_compiler(
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

    @hidden_from_stacklevel
    def quick(*args: Any, **kwargs: Any) -> Any:
        return unwatched(*args, **kwargs) if watcher() is None else slow(*args, **kwargs)

    _skip(torch._C._dynamo.eval_frame, quick)
    vars(quick)["_torchdynamo_disable"] = True  # torch's own mark: not to be inlined
    return quick


def return_unchanged(function: Function) -> Function:
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
