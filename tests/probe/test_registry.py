"""The registry sees every training object, however it was made, and keeps none alive."""

SCRIPT = """
import pytest
import copy, gc, json, pickle, weakref, torch
from torch import nn

pytestmark = pytest.mark.slow

early = nn.Linear(2, 2)
from supervise_probe.torch_state.registry import Registry

registry = Registry()
registry.install(torch)


class Odd(nn.Linear):
    def __eq__(self, other):
        raise ValueError

    __hash__ = nn.Linear.__hash__

    def __len__(self):
        return 0


lone = nn.Linear(2, 1)
odd = Odd(2, 2)
model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)), odd)
ema = copy.deepcopy(model)
loaded = pickle.loads(pickle.dumps(nn.Linear(1, 1)))
modules = {id(m) for m in registry.modules}
found = [id(m) in modules for m in (lone, odd, model, model[1][0], ema, ema[2], loaded, early)]

optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (lone, model)]
schedulers = [
    torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda step: 1),
    torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0]),
]
parts = [torch.optim.lr_scheduler.ConstantLR(optimizers[1]) for _ in range(2)]
schedulers += [*parts, torch.optim.lr_scheduler.SequentialLR(optimizers[1], parts, [3])]
scaler = torch.amp.GradScaler("cpu")
known = [
    sorted(map(id, registry.optimizers)) == sorted(map(id, optimizers)),
    sorted(map(id, registry.schedulers)) == sorted(map(id, schedulers)),
    list(registry.scalers) == [scaler],
]

roots = [[r is m for r in registry.roots()] for m in (lone, model)]
third = torch.optim.SGD(early.parameters(), 0.1)
registry.saw_optimizer(third)
late = [r is early for r in registry.roots()]

references = [weakref.ref(x) for x in (lone, model, scaler, optimizers[0], schedulers[0])]
del lone, model, odd, optimizers, schedulers, parts, scaler
gc.collect()
gone = [r() is None for r in references]
left = [r is early for r in registry.roots()], len(list(registry.schedulers))
print(json.dumps([found, known, roots, late, gone, left]))
"""


def test_the_registry_sees_all_and_holds_none(jobs):
    """Lone layers, copies, unpickled modules, odd classes; one made before is found when needed."""
    found, known, roots, late, gone, left = jobs.run(SCRIPT)[0]
    assert found == [True] * 7 + [False]
    assert known == [True] * 3
    assert roots == [[True, False], [False, True]]
    assert sum(late) == 1
    assert gone == [True] * 5
    assert left == [[True], 0]
