"""The savepoint of another process of the same script, put in the place of one of this process.

A savepoint is taken here as always; it knows this process's objects. Then its contents are
exchanged, piece by piece, for those of the other one, and it is gone back to. What does not fit is
refused before anything is changed; a variable that has no counterpart here is named as lost.

Training state is written into the tensors that are there. A variable's tensor is a new one: here it
may be a view of the data set.
"""

from types import ModuleType
from typing import Any, Dict, List, Optional, Tuple

from ..capture.call_stack import CannotRestore
from ..capture.captured_values import Fields, Tensor, Value
from ..capture.training_state import LOST, SavedOptimizer
from ..runtime.rng import State
from .deserialize import Reader, Tensors, chance_state, constants
from .serialize import WHAT, place_of
from .store import Savepoint


def apply_savepoint(torch: ModuleType, saved: Dict[str, Any], live: Savepoint) -> List[str]:
    """Exchange the contents of `live`, just taken here, for those of the document `saved`.

    Returns names of modules whose variables have no place here yet.

    Raises:
        CannotRestore: it is of another program, or of another model; `live` is of no use any more.
    """
    if saved.get("what") != WHAT:
        raise CannotRestore("the file is no savepoint of this version")
    _require_same_program(saved["place"], place_of(live))
    tensors = Tensors(torch, saved, live)
    _graft_training(saved, live, tensors)
    reader = Reader(tensors, live)
    for kept, optimizer in zip(saved["optimizers"], live.training.optimizers):
        _graft_optimizer(kept, optimizer, tensors, reader)
    for kept, module in zip(saved["modules"], live.training.modules):
        module.buffers = reader.fields(kept[2], module.buffers)
        module.attributes = Fields()
        module.attributes.constants.update(kept[3])
    names = [name for name, _ in saved["others"]]
    if names != [name for _, name, _ in live.training.others]:
        raise CannotRestore("there are other schedulers or scalers than in the savepoint")
    live.training.others = [
        (reference, name, reader.fields(kept, fields))
        for (_, kept), (reference, name, fields) in zip(saved["others"], live.training.others)
    ]
    program = live.program
    for i, kept in enumerate(saved["functions"]):
        if kept is not None and program.functions[i] is not None:
            program.functions[i] = reader.fields(kept, program.functions[i])
    missing = _graft_globals(saved["globals"], program, reader)
    live.rng = _chance(saved["rng"], live.rng)
    live.extra = constants(saved["extra"])
    live.step, live.attempt = saved["step"], saved["attempt"]
    return missing


def _require_same_program(before: List[Any], now: List[Any]) -> None:
    for was, here in reversed(list(zip(before, now))):  # the innermost says most
        if was[1] != here[1]:
            raise CannotRestore(f"the code of {here[0]} is another than that of the savepoint")
        if was[2] != here[2]:
            raise CannotRestore(f"{here[0]} stands at another place than in the savepoint")
    if len(before) != len(now):
        raise CannotRestore("the step is made from another depth of calls than in the savepoint")


def _graft_training(saved: Dict[str, Any], live: Savepoint, tensors: Tensors) -> None:
    """Pair modules and parameters in their order, and set their gradients."""
    modules, parameters = live.training.modules, live.training.parameters
    optimizers = live.training.optimizers
    for what, there, here in (
        ("modules", [kept[0] for kept in saved["modules"]], [m.name for m in modules]),
        ("parameters", [kept[0] for kept in saved["parameters"]], [p.name for p in parameters]),
        (
            "optimizers",
            [kept["type"] for kept in saved["optimizers"]],
            [o.name for o in optimizers],
        ),
    ):
        if there != here:
            raise CannotRestore(
                f"there are other {what} than in the savepoint: {len(here)} and not {len(there)}"
                if len(there) != len(here)
                else f"there are {what} of other kinds or names than in the savepoint"
            )
    for (name, number, requires_grad, gradient), parameter in zip(saved["parameters"], parameters):
        tensors.pair(number, parameter.number, name)
        parameter.requires_grad = requires_grad
        if gradient is None or gradient == LOST:
            parameter.gradient = gradient
        else:
            now = parameter.gradient
            live_one = Tensor(now) if now is not None and now != LOST else None
            parameter.gradient = tensors.number(gradient, live_one)


def _graft_optimizer(
    saved: Dict[str, Any], live: SavedOptimizer, tensors: Tensors, reader: Reader
) -> None:
    here = [[reader.parameters[one] for one in group] for group in live.members]
    there = [[tensors.number(one, None) for one in group] for group in saved["members"]]
    if here != there:
        raise CannotRestore(f"{saved['type']} trains other parameters than in the savepoint")
    live.groups = [
        reader.fields(kept, group) for kept, group in zip(saved["param_groups"], live.groups)
    ]
    known = {
        reader.parameters.get(id(key())) if callable(key) else key: part
        for key, _, part in live.state
    }
    state: List[Tuple[Any, Any, Optional[Value]]] = []
    for (what, place), kept in saved["state"]:
        if what == "parameter":
            number = tensors.number(place, None)
            part = reader.value(kept, known.get(number), f"{saved['type']}.state")
            state.append((reader.reference(number), None, part))
        else:
            state.append((place, None, reader.value(kept, known.get(place), saved["type"])))
    live.state = state
    live.attributes = reader.fields(saved["attributes"], live.attributes)


def _graft_globals(saved: List[Tuple[str, Any]], program: Any, reader: Reader) -> List[str]:
    """Pair modules by name, those of one name in their order; return which are not here."""
    here: Dict[str, List[int]] = {}
    for number, name in program.names.items():
        here.setdefault(name, []).append(number)
    missing = []
    for name, kept in saved:
        if here.get(name):
            number = here[name].pop(0)
            program.globals[number] = reader.fields(kept, program.globals[number])
        else:
            missing.append(f"module {name}")
    return missing


def _chance(saved: List[Tuple[str, Any]], live: List[State]) -> List[State]:
    """Pair the global generators by name."""
    kept = dict(saved)
    missing = sorted(set(kept) - {state.name for state in live})
    if missing:
        raise CannotRestore(f"the generator of {missing[0]} is not in use here yet")
    return [
        State(name, set_back, chance_state(kept[name]) if name in kept else content)
        for name, set_back, content in live
    ]
