"""A replica runs alone only what waits for no other rank: a rank that does would hang the job."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from supervise_probe.sampling import side_forward
from supervise_probe.sampling.forward_inputs import NeverError

torch = pytest.importorskip("torch")
dist = torch.distributed
F = torch.nn.functional

pytestmark = pytest.mark.slow

CONTEXT = SimpleNamespace(torch=torch, position=SimpleNamespace(world_size=2))


@pytest.fixture(scope="module", autouse=True)
def two_ranks():
    """Two ranks of which this is one; torch's own double of a backend waits for nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def functional():
    from torch.distributed import _functional_collectives as collectives

    return collectives.wait_tensor(collectives.all_reduce(torch.ones(2), "sum", dist.group.WORLD))


CALLS = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(2)),
    "async": lambda: dist.all_reduce(torch.ones(2), async_op=True),
    "broadcast": lambda: dist.broadcast(torch.ones(2), 0),
    "barrier": dist.barrier,
    "send": lambda: dist.send(torch.ones(2), 1),
    "object": lambda: dist.all_gather_object([None, None], 1),
    "functional": functional,
}


@pytest.mark.parametrize("name", CALLS)
def test_what_may_wait_for_other_ranks_is_refused_before_it_does(name):
    with (
        side_forward.without_other_ranks(CONTEXT),
        pytest.raises(NeverError, match="may wait for other ranks"),
    ):
        CALLS[name]()
    CALLS[name]()  # behind it the job calls what it likes


def test_arithmetic_is_not():
    x = torch.randn(2, 3, 8)
    with side_forward.without_other_ranks(CONTEXT), torch.no_grad():
        attended = F.scaled_dot_product_attention(x, x, x)
        loss = F.cross_entropy(F.dropout(attended, 0.1).flatten(0, 1), torch.zeros(6).long())
    assert loss.isfinite()


def test_only_the_module_of_one_wrapper_of_all_ranks_is_a_replica():
    module = torch.nn.Linear(2, 2)
    whole = torch.nn.parallel.DistributedDataParallel(module)
    assert side_forward.replica(CONTEXT, whole) is module

    more = SimpleNamespace(torch=torch, position=SimpleNamespace(world_size=4))
    for context, root in ((CONTEXT, module), (more, whole)):
        with pytest.raises(side_forward.RefusedError, match="cannot run the model alone"):
            side_forward.replica(context, root)
