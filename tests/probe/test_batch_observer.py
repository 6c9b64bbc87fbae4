"""Inputs and losses that wait for a backward: what is left of them where none comes."""

from collections import UserDict
from types import SimpleNamespace

import pytest

from supervise_probe.collectors import Inputs
from supervise_probe.runtime import Guard
from supervise_probe.stepping.batch_observer import FORWARDS, BatchObserver


class OnDevice:
    """A number that adds to none of another device."""

    def __radd__(self, other):
        return self

    def __add__(self, other):
        raise RuntimeError("expected all tensors to be on the same device")


def forward_without_backward(observer, losses):
    observer.add_inputs((), {})
    for _ in range(losses):
        node = SimpleNamespace(metadata={})
        observer.add_targets(None, -100, SimpleNamespace(grad_fn=node), "mean", None)


def test_losses_on_several_devices_raise_nothing_in_the_job():
    """They cannot be added up: the count of discarded losses goes off, and the rest goes on."""
    looks, off = [], []
    guard = Guard(lambda part, reason: off.append((part.name, reason)))
    batch = SimpleNamespace(
        inputs=SimpleNamespace(detached_tensors=lambda value: value),
        hash_model_input=lambda values: looks.append(values),
    )
    tokens = SimpleNamespace(
        scalars=SimpleNamespace(value=lambda result: OnDevice()),
        add_loss_calls=lambda targets: None,
    )
    discards = SimpleNamespace(
        add_discarded_losses=lambda values: None, record_forward_only=lambda: None
    )
    observer = BatchObserver(guard, batch, tokens, None, None, discards)
    for _ in range(3 * FORWARDS):
        forward_without_backward(observer, losses=2)
    assert off == [("discards", off[0][1])] and "same device" in off[0][1]
    assert len(looks) > FORWARDS


def test_an_input_that_cannot_be_looked_at_raises_nothing_in_the_job():
    def refuse(value):
        raise RuntimeError("no such tensor")

    batch = SimpleNamespace(
        inputs=SimpleNamespace(detached_tensors=refuse), hash_model_input=lambda values: None
    )
    tokens = SimpleNamespace(scalars=SimpleNamespace(value=None))
    observer = BatchObserver(Guard(lambda *_: None), batch, tokens, None, None, None)
    observer.add_inputs((1,), {"mask": UserDict()})
    assert observer.has_inputs


class FakeTensor:
    """Whole numbers, at the edge to torch."""

    dtype = layout = "int64"
    is_nested = requires_grad = False

    def numel(self):
        return 2


TENSOR, OTHER = FakeTensor(), FakeTensor()


def count(value):
    if isinstance(value, (dict, UserDict)):
        value = tuple(value.values())
    return 1 + sum(map(count, value)) if isinstance(value, (list, tuple)) else 1


@pytest.mark.parametrize(
    ("values", "most"),
    [
        (([[[1] * 64] * 64] * 64,), 200),
        (({n: [UserDict({"a": [TENSOR] * 64})] * 64 for n in range(64)}, TENSOR), 300),
        (({"images": [OTHER] * 64, "ids": TENSOR},), 70),
        ((UserDict(dict.fromkeys(range(64), 1)), [OTHER, TENSOR]), 70),
        (([(1, OTHER)] * 70, [TENSOR]), 200),
        (([[[OTHER]]], {"a": {"b": {"c": {"d": TENSOR}}}}), 9),
        ((), 1),
    ],
)
def test_a_copy_of_inputs_is_as_large_as_what_is_looked_at(values, most):
    """A limit of each container came to 64 times 64 times 64 values at each forward."""
    torch = SimpleNamespace(
        Tensor=FakeTensor, strided="int64", bool="bool", int64="int64", int32="int32"
    )
    inputs = Inputs(torch)
    copied = inputs.detached_tensors(values)
    assert count(copied) <= most
    assert inputs.find(copied) == inputs.find(values)
    assert list(inputs.iterate_tensors(copied)) == list(inputs.iterate_tensors(values))
