"""Signals that a scheduler sends to every process of the job wait for the supervisor's word.

Slurm signals all processes of a step, not the first one alone. What comes to the supervisor waits
for a checkpoint; the same signal would meanwhile end this process. So while the supervisor offers
to hold signals, the word `KEEP` of the segment says until when, the handler here drops it and says
so: whoever got it first, the supervisor passes it on in its time. It takes its offer back before
that. Without an offer, as when the supervisor has died, the signal does what it does by default.

Only with `job.preempt`, in the main thread, for signals that have their default action at the first
boundary, so after a library has set its own. Handlers do not survive an `exec`, and a fork puts
the default back: children are as they would be.

Python runs a handler between two of its bytecodes: what is in native code then ends a little later.
"""

from __future__ import annotations

import os
import signal
import threading
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, List

if TYPE_CHECKING:
    from ..context import ProbeContext

KEPT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # what the supervisor may hold


class KeptSignals:
    """The handlers of this process, once `install` was called."""

    def __init__(self, context: ProbeContext) -> None:
        self._reporter, self._position = context.reporter, context.position
        self._pid = 0

    def install(self) -> None:
        """Take the signals that nobody has taken; of one rank alone."""
        alone = self._position.world_size == 1
        if not alone or threading.current_thread() is not threading.main_thread():
            return
        self._pid = os.getpid()
        for signum in KEPT:
            if signal.getsignal(signum) == signal.SIG_DFL:
                signal.signal(signum, self._on_signal)
                signal.siginterrupt(signum, False)  # C code of the job may not know of EINTR
        os.register_at_fork(after_in_child=self._restore)
        self._reporter.status_changed()

    def names(self) -> List[str]:
        """Return the signals whose handler is ours, and not the job's, now."""
        return [signal.Signals(signum).name for signum in self._own()]

    def _own(self) -> List[int]:
        # A bound method is made anew each time it is read: equal, not the same.
        return [each for each in KEPT if self._pid and signal.getsignal(each) == self._on_signal]

    def _on_signal(self, signum: int, _frame: Any) -> None:
        writer = self._reporter.writer
        ours = os.getpid() == self._pid and writer is not None
        if ours and monotonic_ns() < writer.keep_until_ns():
            name = signal.Signals(signum).name
            text = f"{name} came to the job itself, and waits with that of the supervisor"
            self._reporter.notice("signal-kept", text, {"signal": name})
            return
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    def _restore(self) -> None:
        for signum in self._own():
            signal.signal(signum, signal.SIG_DFL)
