"""Run one program undisturbed and, in forks of its process, each branch of its faults.

    python branches.py PLAN.json PROGRAM.py [its arguments]

The program is not changed: the hooks are around modules, backward and the optimizer's step. A row
begins at the first forward with gradients after a step. At the row of a fault the process forks;
the child injects the fault (a drill of the probe), and forks again for each remedy where that
begins. So no row is computed twice. Each branch writes `<out>/<name>.json`: the loss of every row,
the final loss and the CPU time; its name is `twin`, `<fault>` (nothing is done) or
`<fault>.<remedy>`.

The plan has `out`; `faults`: name -> drill, params, row, remedies; and `only`: the one branch that
is to be run without forks, for jobs of several ranks, whose process groups do not survive them.
"""

from __future__ import annotations

import io
import json
import os
import re
import resource
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optim

from supervise_probe import faults

DELAY = 3  # rows from the first one of the fault to the first one under the remedy
NOW = "_now"  # the suffix of a remedy that begins with the next row
MOST_SKIPS = 32
TWIN = "twin"


def back(remedy: str) -> int:
    """Return how many steps a remedy restores, 0 if it is another one."""
    return int(remedy.rpartition("_")[2]) if remedy.startswith("restore_") else 0


def delay(remedy: str) -> int:
    """Return how many rows after its fault a remedy begins."""
    return 1 if remedy.endswith(NOW) else DELAY


def copied(values: Any) -> Any:
    """Return a copy of a state with copies of its tensors."""
    return {k: v.clone() if torch.is_tensor(v) else v for k, v in values.items()}


class Run:
    """One branch, a process; a fork goes on as another one."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan, self._only, self._out = plan["faults"], plan["only"], Path(plan["out"])
        self.name, self.failed = TWIN, False
        self.stepped = True  # since the row began
        self._losses: list[float] = []
        self._roots: list[nn.Module] = []
        self._optimizers: list[Any] = []
        self._rates: list[float] = []
        self._scaler: Any = None
        self._scale = 1.0
        self._fault: faults.Fault | None = None
        self._first, self._over = 0, 0  # row of the fault, first one after it
        self._remedy = ""
        wanted = [(f["row"], back(r)) for f in self._plan.values() for r in f["remedies"]]
        self._states: dict[int, Any] = {self._source(*each): None for each in wanted}

    @staticmethod
    def _source(row: int, steps: int) -> int:
        """Return the row before which the state was, that is restored `steps` back."""
        return max(0, row + DELAY - steps)

    def _begin(self, row: int) -> None:
        self._losses.append(0.0)
        self.stepped = False
        if self.name == TWIN:
            if row in self._states:
                self._states[row] = self._state()
            for name, fault in self._plan.items():
                if row == fault["row"] and self._split(name):
                    self._fault = faults.fault_classes()[fault["drill"]](torch, fault["params"])
                    self._first, self._over = row, row + self._fault.steps
                    break
        elif not self._remedy:
            for remedy in self._plan[self.name]["remedies"]:
                if row == self._first + delay(remedy) and self._split(f"{self.name}.{remedy}"):
                    self._remedy = remedy.removesuffix(NOW)
                    if back(remedy):
                        self._restore(*self._states[self._source(self._first, back(remedy))])
                    break
        if self._fault is not None and row >= self._over:
            self._fault.end()
            self._fault = None

    def _split(self, name: str) -> bool:
        """Return True in the process that goes on as this branch, False in the other one."""
        if self._only is not None:
            mine = f"{self._only}.".startswith(f"{name}.")
        elif mine := not (child := os.fork()):
            self.failed = False
        else:
            self.failed |= bool(os.waitpid(child, 0)[1])
        self.name = name if mine else self.name
        return mine

    def _state(self) -> tuple[Any, ...]:
        """Return what a rollback knows: loop, schedules and generators are not of it."""
        kept = [{p: copied(state) for p, state in o.state.items()} for o in self._optimizers]
        scaler = None if self._scaler is None else self._scaler.state_dict()
        return [copied(root.state_dict()) for root in self._roots], kept, scaler

    def _restore(self, modules: list[Any], kept: list[Any], scaler: Any) -> None:
        for root, state in zip(self._roots, modules, strict=False):
            root.load_state_dict(state)
        for number, optimizer in enumerate(self._optimizers):
            optimizer.state.clear()
            if number < len(kept):  # else it had not stepped yet
                optimizer.state.update(kept[number])
        if scaler is not None:
            self._scaler.load_state_dict(scaler)

    def forward(self, root: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """An outermost module is called with gradients; return its arguments."""
        if root not in self._roots:
            self._roots.append(root)
        if self.stepped:
            self._begin(len(self._losses))
        return self._fault.forward(root, args, kwargs) if self._fault else (args, kwargs)

    def scaled(self, scaler: Any) -> None:
        """A gradient scaler has multiplied a loss."""
        self._scaler, self._scale = scaler, scaler.get_scale()

    def after_backward(self, loss: float) -> None:
        """A backward has run; several of one step are parts of one mean."""
        self._losses[-1] += loss / self._scale
        if self._fault:
            self._fault.after_backward(self._parameters(self._optimizers))

    def before_update(self, optimizer: Any) -> None:
        """The gradients are final."""
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        self._rates = [group["lr"] for group in optimizer.param_groups]
        if not self._fault:
            return
        self._fault.before_update(self._parameters([optimizer]))
        self._fault.before_step(self._optimizers)
        if self._remedy != "hold_rate":
            for group in optimizer.param_groups:
                group["lr"] *= self._fault.lr_factor()
        if self._remedy == "skip" and len(self._losses) <= self._first + DELAY + MOST_SKIPS:
            for parameter in self._parameters([optimizer]):
                parameter.grad = None  # no update, no decay, no change of a moment

    def after_update(self, optimizer: Any, *_: Any) -> None:
        """The optimizer has stepped."""
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        self.stepped = True

    @staticmethod
    def _parameters(optimizers: list[Any]) -> list[Any]:
        return [p for o in optimizers for group in o.param_groups for p in group["params"]]

    def write(self, said: str) -> None:
        """Write the result of this branch, whose program said this."""
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        result = {
            "losses": self._losses,
            "final_loss": float(re.findall(r"^final_loss (\S+)", said, re.MULTILINE)[-1]),
            "cpu_s": sum(each.ru_utime + each.ru_stime for each in used),
        }
        (self._out / f"{self.name}.json").write_text(json.dumps(result))


def hook(run: Run) -> None:
    """Stand around forward, backward and step."""
    scaler, depth = torch.amp.GradScaler, 0
    call, backward = nn.Module.__call__, torch.Tensor.backward
    scale, update = scaler.scale, scaler.update

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        outermost = depth == 0 and torch.is_grad_enabled() and module.training
        if outermost and next(module.parameters(), None) is not None:
            args, kwargs = run.forward(module, args, kwargs)
        depth += 1
        try:
            return call(module, *args, **kwargs)
        finally:
            depth -= 1

    def scaling(self: Any, outputs: Any) -> Any:
        result = scale(self, outputs)
        run.scaled(self)
        return result

    def updated(self: Any, *args: Any, **kwargs: Any) -> None:
        run.stepped = True  # an update that overflowed is a row, too
        update(self, *args, **kwargs)

    def differentiate(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        backward(loss, *args, **kwargs)
        run.after_backward(loss.item())

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure") or (*args[1:], None)[0]
        if closure is None:
            return run.before_update(optimizer)

        def then() -> Any:  # a framework's forward and backward are in it
            result = closure()
            run.before_update(optimizer)
            return result

        return args[:1], {**kwargs, "closure": then}

    nn.Module.__call__ = forward
    torch.Tensor.backward = differentiate
    scaler.scale, scaler.update = scaling, updated
    optim.register_optimizer_step_pre_hook(before)
    optim.register_optimizer_step_post_hook(run.after_update)


def main() -> int:
    """Run the program and write the result of each process that it has become."""
    plan, script = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    sys.argv = sys.argv[2:]
    sys.path[0] = str(script.parent)
    torch.set_num_threads(1)
    process, run, code = os.getpid(), Run(plan), 1
    hook(run)
    said = sys.stdout = io.StringIO()
    try:
        runpy.run_path(str(script), run_name="__main__")
        if os.environ.get("RANK", "0") == "0":
            run.write(said.getvalue())
        code = int(run.failed)
    except Exception:
        sys.excepthook(*sys.exc_info())
        print(f"in branch {run.name}", file=sys.stderr)
    if os.getpid() != process:
        sys.stderr.flush()
        os._exit(code)  # what is to be cleaned up is the parent's
    return code


if __name__ == "__main__":
    sys.exit(main())
