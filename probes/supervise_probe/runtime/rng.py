"""All sources of chance that torch, numpy and Python hold, and generators of the job's own.

Rule: only what the job has imported or initialised is read; nothing is imported or started here.
"""

import sys
from types import ModuleType
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple


class State(NamedTuple):
    """One global generator: its name, how to set it back, and to what."""

    name: str
    set_back: Callable[[Any], Any]
    content: Any


def global_states(torch: ModuleType) -> List[State]:
    """The state of torch's CPU generator, of CUDA's if initialised, of numpy and `random`."""
    generators = {"torch": torch.default_generator}
    if torch.cuda.is_initialized():
        for number, generator in enumerate(torch.cuda.default_generators):
            generators[f"cuda:{number}"] = generator
    states = [State(name, g.set_state, g.get_state()) for name, g in generators.items()]
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        states.append(State("numpy", numpy.set_state, numpy.get_state()))
    chance = sys.modules.get("random")
    if chance is not None:
        states.append(State("random", chance.setstate, chance.getstate()))
    return states


def restore(states: List[State]) -> None:
    """Set every global generator back."""
    for state in states:
        state.set_back(state.content)


def seed(torch: ModuleType, number: int) -> None:
    """Let every generator of `global_states` begin at `number`."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(number)
    for name in ("numpy.random", "random"):
        module = sys.modules.get(name)
        if module is not None:
            module.seed(number)


def seed_one(generator: Any, number: int) -> None:
    """Let a generator of one of `generator_types` begin at `number`."""
    if hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        bits.state = type(bits)(number).state
    elif hasattr(generator, "manual_seed"):
        generator.manual_seed(number)
    else:
        generator.seed(number)


def generator_types(torch: ModuleType) -> Tuple[type, ...]:
    """The classes of generators that a job makes for itself, as far as they are loaded."""
    types: List[type] = [torch.Generator]
    for module, names in _CLASSES.items():
        loaded = sys.modules.get(module)
        types += [getattr(loaded, name) for name in names if hasattr(loaded, name)]
    return tuple(types)


def state_of(generator: Any) -> Any:
    """The state of a generator of one of `generator_types`, independent of the generator."""
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    read: Optional[Callable[[], Any]] = getattr(generator, "getstate", None)
    return read() if read is not None else generator.get_state()


def set_state_of(generator: Any, state: Any) -> None:
    """Give a generator the state that `state_of` returned."""
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)


_CLASSES: Dict[str, Tuple[str, ...]] = {
    "numpy.random": ("Generator", "RandomState"),
    "random": ("Random",),
}
