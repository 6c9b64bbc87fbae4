"""Inputs and losses that wait for a backward: what is left of them where none comes."""

from collections import UserDict
from types import SimpleNamespace

from supervise_probe.runtime import Guard
from supervise_probe.stepping.batch_observer import FORWARDS, BatchObserver


class OnDevice:
    """A number that adds to none of another device."""

    def __radd__(self, other):
        return self

    def __add__(self, other):
        raise RuntimeError("expected all tensors to be on the same device")


def forward_without_backward(observer, losses):
    observer.inputs((), {})
    for _ in range(losses):
        node = SimpleNamespace(metadata={})
        observer.targets(None, -100, SimpleNamespace(grad_fn=node), "mean", None)


def test_losses_on_several_devices_raise_nothing_in_the_job():
    """They cannot be added up: the count of discarded losses goes off, and the rest goes on."""
    looks, off = [], []
    guard = Guard(lambda part, reason: off.append((part.name, reason)))
    batch = SimpleNamespace(
        inputs=SimpleNamespace(without_graph=lambda value: value),
        saw=lambda values: looks.append(values),
    )
    tokens = SimpleNamespace(
        scalars=SimpleNamespace(value=lambda result: OnDevice()), saw_targets=lambda targets: None
    )
    discards = SimpleNamespace(losses=lambda values: None, goes_on=lambda: None)
    observer = BatchObserver(guard, batch, tokens, None, None, discards)
    for _ in range(3 * FORWARDS):
        forward_without_backward(observer, losses=2)
    assert off == [("discards", off[0][1])] and "same device" in off[0][1]
    assert len(looks) > FORWARDS


def test_an_input_that_cannot_be_looked_at_raises_nothing_in_the_job():
    def refuse(value):
        raise RuntimeError("no such tensor")

    batch = SimpleNamespace(inputs=SimpleNamespace(without_graph=refuse), saw=lambda values: None)
    tokens = SimpleNamespace(scalars=SimpleNamespace(value=None))
    observer = BatchObserver(Guard(lambda *_: None), batch, tokens, None, None, None)
    observer.inputs((1,), {"mask": UserDict()})
    assert observer.went_in
