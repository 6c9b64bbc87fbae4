"""How the entries of a checkpoint are explained, and what is left unexplained."""

import sys

import pytest

from supervise_probe.checkpoints.layout import Learner, Sources, containers
from supervise_probe.checkpoints.variable_lookup import VariableScope
from supervise_probe.errors import Refused
from supervise_probe.torch_state.registry import Registry

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow


def scope(saved=()):
    return VariableScope([sys._getframe(1)], set(map(id, containers(saved))))


def learn(saved, here, steps=7, things=()):
    """The layout of `saved`; `things` are what the registry knows."""
    registry = Registry()
    registry._torch = torch
    for thing in things:
        registry.saw(thing)
    return Learner(torch, registry, here, steps).learn(saved)


def build(layout, here, steps=9, stale=()):
    made = ("saved", *stale)  # as each save makes them
    return layout.build(Sources(here, lambda name, _: name.variable in made, steps))


@pytest.fixture
def optimizers():
    nets = [torch.nn.Linear(2, 2) for _ in range(2)]
    return [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]


def test_schedules_that_look_alike_are_told_apart(optimizers):
    """By the very lists that their state dicts hold."""
    first, second = (torch.optim.lr_scheduler.StepLR(o, 5) for o in optimizers)
    saved = {"b": second.state_dict(), "a": first.state_dict()}
    layout = learn(saved, scope(saved), things=[first, second])
    optimizers[1].step()
    second.step()
    built = build(layout, scope())
    assert (built["b"]["last_epoch"], built["a"]["last_epoch"]) == (1, 0)


def test_what_cannot_be_told_apart_is_not_known():
    """Two scalers of the same numbers, of which one is saved."""
    one, other = (torch.amp.GradScaler("cpu") for _ in range(2))
    saved = {"scaler": one.state_dict()}
    with pytest.raises(Refused, match="'scaler"):
        build(learn(saved, scope(saved), things=[one, other]), scope())
    assert build(learn(saved, scope(saved), things=[one]), scope()) == saved


# pytest's asserts read locals(), as the probe never would: the variables are those of functions
# without one.


def test_nothing_is_kept_alive(optimizers):
    """An optimizer that is gone is said to be gone."""
    saved = {"optimizer": optimizers[0].state_dict()}
    layout = learn(saved, scope(saved), things=optimizers[:1])
    assert layout.kinds == {"optimizer"}
    del optimizers[:]
    with pytest.raises(Refused, match="no longer exists"):
        build(layout, scope())
