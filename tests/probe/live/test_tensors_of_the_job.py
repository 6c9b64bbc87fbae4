"""Tensors of the job that share memory or have none: what the probe reads and writes of them."""

from itertools import count
from types import SimpleNamespace

import pytest
import torch

from supervise_probe.collectors import TokensCollector
from supervise_probe.runtime import Scalars
from supervise_probe.savepoints import (
    SWAPPED_OUT,
    Busy,
    CannotRestore,
    SavepointManager,
    StateWatch,
)
from supervise_probe.torch_state import (
    LearningRate,
    OptimizerInfo,
    Optimizers,
    RateHold,
    Registry,
    Warmup,
)


@pytest.fixture
def adam():
    """A module and its optimizer after one step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def free(tensor):
    """Free the memory of a tensor, as offload does; return what fills it again."""
    content, storage = tensor.detach().clone(), tensor.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)

    def fill():
        storage.resize_(size)
        tensor.data.copy_(content)

    return fill


def manager(model, optimizer):
    registry = Registry()
    registry.modules.add(model)
    registry.optimizers.add(optimizer)
    return SavepointManager(torch, registry, keep=2, max_bytes=1 << 20)


def test_freed_optimizer_state_is_neither_saved_nor_written(adam):
    """It ended the job; a savepoint without moments would be none."""
    model, optimizer = adam
    moments = optimizer.state[model.weight]["exp_avg"]
    savepoints = manager(model, optimizer)
    savepoints.save(0, 0, None)
    weight = model.weight.detach().clone()
    model.weight.data.add_(1)
    fill = free(moments)

    with pytest.raises(CannotRestore, match="training state has no memory between two steps"):
        savepoints.restore(1)
    assert torch.equal(model.weight, weight + 1)
    fill()
    savepoints.restore(1)
    assert torch.equal(model.weight, weight)


@pytest.mark.parametrize("nested", [False, True])
def test_savepoints_stay_while_optimizer_state_is_swapped_out(adam, nested):
    """As around generation; where it never has memory between two steps no rollback can work."""
    model, optimizer = adam
    moments = optimizer.state[model.weight]["exp_avg"]
    if nested:
        optimizer.state[model.weight]["inner"] = {"moments": [optimizer.state.pop(model.weight)]}
    savepoints = manager(model, optimizer)
    savepoints.save(0, 0, None)
    refused = "state of Adam has no memory between two steps"
    for step in (1, SWAPPED_OUT):
        fill = free(moments)
        for later in range(step, step + SWAPPED_OUT - 1):
            with pytest.raises(Busy, match=refused):
                savepoints.save(later, 0, None)
        assert 0 in savepoints.steps
        fill()
        if step == 1:
            savepoints.save(SWAPPED_OUT - 1, 0, None)
    fill = free(moments)
    with pytest.raises(CannotRestore, match=refused):
        savepoints.save(3 * SWAPPED_OUT, 0, None)
    assert savepoints.steps == []
    fill()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_older_moments_are_taken_wherever_the_state_holds_them(adam, depth):
    """As Shampoo and wrappers of optimizers nest them; what is not copied is left alone."""
    model, optimizer = adam
    state = optimizer.state[model.weight]
    moments, sparse = state["exp_avg"], torch.eye(2).to_sparse()
    for _ in range(depth - 1):
        state = optimizer.state[model.weight] = {"inner": [state], "rows": sparse}
    savepoints, before = manager(model, optimizer), moments.clone()
    savepoints.save(0, 0, None)
    moments.mul_(1000.0)
    savepoints.save(1, 0, None, older_moments=True)
    savepoints.restore(2, sign=2)

    assert torch.equal(moments, before)


def test_freed_weights_are_not_saved_and_a_freed_buffer_is_left_alone(adam):
    model, optimizer = adam
    model.register_buffer("cache", torch.ones(64))
    fill = free(model.cache)
    savepoints = manager(model, optimizer)
    savepoints.save(0, 0, None)
    assert savepoints.restore(1)[0]["not_restored"] == ["Linear.cache"]
    fill()
    fill = free(model.weight)
    with pytest.raises(Busy, match=r"Linear.weight has no memory between two steps"):
        savepoints.save(1, 0, None)
    fill()


def test_a_freed_gradient_stays_freed(adam):
    model, optimizer = adam
    savepoints = manager(model, optimizer)
    savepoints.save(0, 0, None)
    fill = free(model.weight.grad)
    savepoints.restore(1)
    assert not model.weight.grad.untyped_storage().nbytes()
    fill()


def test_optimizer_state_that_is_swapped_out_and_in_was_not_written(adam):
    """Bytes at no address were compared with those of the state."""
    model, optimizer = adam
    optimizers = Optimizers()
    optimizers.known[id(optimizer)] = OptimizerInfo(optimizer)

    class Pace:
        due = True

        def adjust_interval(self, spent_ns, elapsed_ns):
            pass

    watch = StateWatch(torch, Scalars(torch), optimizers, Pace())
    moments = [
        optimizer.state[parameter][key]
        for parameter in model.parameters()
        for key in ("exp_avg", "exp_avg_sq")
    ]
    for freed_first in (True, False):
        fills = [free(tensor) for tensor in moments] if freed_first else []
        watch.step_ended(1)
        if not freed_first:
            fills = [free(tensor) for tensor in moments]
            assert watch.has_marks and not watch.changed_outside_optimizer(1)
        for fill in fills:
            fill()
        assert not watch.changed_outside_optimizer(1)


@pytest.fixture
def rates(tmp_path):
    """The rates of the probe, and an optimizer whose three groups share one tensor as theirs."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(3)]
    optimizer = torch.optim.SGD(groups, lr=torch.tensor(0.5))
    return LearningRate(torch, Scalars(torch), str(tmp_path)), optimizer


def rates_of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_groups_that_share_a_rate_get_it_scaled_once(rates):
    rate, optimizer = rates
    (shared,) = {id(group["lr"]) for group in optimizer.param_groups}
    rate.held = Warmup(0.5)
    rate.reschedule(optimizer, 4.0)
    assert rates_of(optimizer) == [2.0] * 3
    rate.apply(optimizer, 2.0, 0, 5)
    assert rates_of(optimizer) == [2.0] * 3
    rate.restore_job_rates()
    assert rates_of(optimizer) == [0.5] * 3 and not rate.is_scaled
    assert {id(group["lr"]) for group in optimizer.param_groups} == {shared}


def test_of_groups_that_share_a_rate_the_lowest_limit_counts(rates):
    """No group has more than its limit, and the share of its rate that the first has says so."""
    rate, optimizer = rates
    rate.hold = RateHold({0: 0.25, 1: 0.125, 2: 0.25}, 0, 0, {})
    rate.apply(optimizer, 1.0, 0, 5)
    assert rates_of(optimizer) == [0.125] * 3 and rate.hold.used == 0.25
    rate.restore_job_rates()
    assert rates_of(optimizer) == [0.5] * 3
    rate.hold = RateHold({1: 1.0}, 0, 0, {})
    rate.apply(optimizer, 1.0, 0, 6)
    assert rates_of(optimizer) == [0.5] * 3 and rate.hold.used == 1.0


def test_a_rate_that_the_optimizer_puts_in_place_of_a_shared_one_is_its_own(rates):
    rate, optimizer = rates
    rate.held = Warmup(0.5)
    rate.apply(optimizer, 1.0, 0, 5)
    optimizer.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"] / 2
    rate.restore_job_rates()
    assert rates_of(optimizer) == [0.5, 0.25, 0.5]


def installed(clock):
    """A registry that hears of modules and optimizers of two classes, and these.

    They are of the test: torch itself is not wrapped in this process.
    """
    module = type("Module", (torch.nn.Linear,), {})
    optimizer = type("Optimizer", (torch.optim.SGD,), {})
    before = [module(2, 2) for _ in range(5)]
    registry, nothing = Registry(clock=clock), SimpleNamespace()
    registry.install(
        SimpleNamespace(
            nn=SimpleNamespace(Module=module, modules=SimpleNamespace(module=nothing)),
            optim=SimpleNamespace(Optimizer=optimizer, lr_scheduler=nothing),
            amp=nothing,
            cuda=SimpleNamespace(amp=nothing),
        )
    )
    return registry, module, optimizer, before


def test_new_optimizers_have_the_heap_scanned_twice_and_then_seldom():
    """A scan takes half a second in a large heap; a job may make an optimizer for each sample."""
    seconds = count(0, 10**9)  # each look at the clock is a second later
    registry, module, optimizer, before = installed(lambda: next(seconds))
    first = optimizer(before[0].parameters(), lr=0.1)
    assert registry.roots() == [before[0]] and {*registry.modules} == {*before}
    samples = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    optimizers = [first]
    late = []
    for sample in samples:
        late.append(module.__new__(module))  # announced by nothing
        late[-1].__dict__.update(before[0].__dict__)
        optimizers.append(optimizer([sample], lr=0.1))
        registry.roots()
    assert {*registry.modules} == {*before, late[0]}
    for _ in range(1000):
        next(seconds)
    optimizers.append(optimizer([samples[0]], lr=0.1))
    registry.roots()
    assert {*registry.modules} == {*before, *late}


def test_a_scan_that_was_put_off_is_made_once_it_may_be():
    """Though no module or optimizer has come since: the module would never be watched."""
    now = [0]

    def clock():
        now[0] += 10**9
        return now[0]

    registry, module, optimizer, before = installed(clock)
    samples = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    made = [optimizer([sample], lr=0.1) for sample in samples if registry.roots() == []]
    assert registry.roots() == []
    late = module.__new__(module)  # announced by nothing
    weights = {"weight": torch.nn.Parameter(torch.ones(2, 2))}
    late.__dict__.update(before[0].__dict__, _parameters=weights)
    made.append(optimizer(weights.values(), lr=0.1))
    assert registry.roots() == [] == registry.roots()
    now[0] += 1000 * 10**9
    assert registry.roots() == [late]


def test_a_new_optimizer_of_a_tensor_of_no_module_walks_through_no_module():
    """As for each sample, beside a large model that is frozen."""
    registry, module, optimizer, before = installed(lambda: 0)
    walks = []

    class Walked(module):
        def named_parameters(self, *args, **kwargs):
            walks.append(self)
            return super().named_parameters(*args, **kwargs)

    frozen = Walked(2, 2)
    registry.modules.add(frozen)
    sample = torch.zeros(2, requires_grad=True)
    made = [optimizer([sample], lr=0.1)]
    assert registry.roots() == [] and not walks
    made.append(optimizer(frozen.parameters(), lr=0.1))
    assert registry.roots() == [frozen] and walks
    assert {*before} < {*registry.modules}


@pytest.mark.parametrize("late", [False, True])
def test_a_micro_batch_without_targets_counts_none_and_loses_no_loss(late):
    """Its mean loss is NaN, and a tensor of no elements has no memory."""
    scalars = Scalars(torch, late=late)
    context = SimpleNamespace(torch=torch, scalars=scalars)
    tokens = TokensCollector(context, SimpleNamespace(has_other_ranks=False))
    nothing = torch.empty(0, dtype=torch.int64)
    for target, loss in ((nothing, torch.nan), (torch.arange(4), 0.5), (nothing, torch.nan)):
        tokens.add_loss_calls([(target, -100, False, scalars.value(torch.tensor(loss)))])
    tokens.after_update(None)
    values = {}
    tokens.collect(None, values)
    assert {name: float(value) for name, value in values.items()} == {
        "tokens_per_update": 4,
        "train_loss": 0.5,
        "losses_without_targets": 0.0,  # of the loss that had a backward nothing is known
    }
