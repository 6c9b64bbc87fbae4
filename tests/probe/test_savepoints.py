"""A rollback in process restores what updates change, bit by bit, and leaves the loop alone."""

import pytest

from tests.support.savepoint_jobs import of_kind, rollback

from .savepoint_scripts import PREAMBLE, STATES

pytestmark = pytest.mark.slow

OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(model.parameters(), lr=0.01)",
    "fused": "torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)",
    "tensor-lr": "torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))",
    "momentum": "torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)",
    "lbfgs": "torch.optim.LBFGS(model.parameters(), lr=0.01)",
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_buffers_and_moments_are_those_of_the_savepoint(jobs, optimizer):
    """Two rollbacks, the second to the same savepoint; batches, draws and schedule go on."""
    script = STATES.replace("AdamW", OPTIMIZERS[optimizer])
    result, events = jobs.run(
        script, every=5, keep=3, rollbacks=[rollback(18, 14), rollback(22, 14)]
    )
    states, draws, rates = result["states"], result["draws"], result["rates"]

    assert [r["step"] for r in of_kind(events, "restored")] == [10, 10]
    assert states[18] == states[22] == states[10]
    assert len({*states} - {states[10]}) == 27
    assert len({*map(tuple, draws)}) == 30
    assert rates == sorted(rates, reverse=True) and len({*rates}) == 30
    assert result["gradients"][18] == 0.0 < result["gradients"][17]


def test_a_scaler_goes_back_with_the_weights(jobs):
    script = (
        PREAMBLE
        + """
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
scales = []
for n in range(12):
    scaler.scale(model(torch.ones(3, 4)).sum()).backward()
    scaler.step(optimizer)
    scales.append(scaler.get_scale())
    scaler.update()
    optimizer.zero_grad()
print(json.dumps(scales))
"""
    )
    scales, events = jobs.run(script, every=4, rollbacks=[rollback(10, 9)])
    assert [r["step"] for r in of_kind(events, "restored")] == [8]
    assert scales[8:12] == [64.0] * 4


def test_state_that_cannot_be_restored_is_named(jobs):
    script = (
        PREAMBLE
        + """
class Counter:
    n = 0

for n in range(12):
    train_step()
    optimizer.state[model.weight]["counter"] = Counter()
print(json.dumps(n))
"""
    )
    _, events = jobs.run(script, every=3, rollbacks=[rollback(7, 6)])
    (outcome,) = of_kind(events, "restored")
    assert outcome["not_restored"] == ["AdamW.state['counter']"]


def test_savepoints_do_not_keep_the_job_alive(jobs):
    """A model that the job deletes goes at once, and its savepoints with it."""
    script = """
import gc, json, weakref, torch
from torch import nn

def main():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    batch = torch.ones(3, 4)
    references = [weakref.ref(x) for x in (model, optimizer, batch)]
    for n in range(9):
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
    del model, optimizer, batch, loss
    gc.collect()
    print(json.dumps([r() is None for r in references]))

main()
"""
    gone, events = jobs.run(script, every=2, rollbacks=[rollback(5, 5)])
    assert gone == [True] * 3
    assert len(of_kind(events, "restored")) == 1
    assert events[-1] == {"end": []}


FOR = """
n = 0
for n in range(12):
    train_step()
"""
UNSAVED = [
    (
        """
def step_in_backward(parameter):
    optimizer.step()
    optimizer.zero_grad()

model.weight.register_post_accumulate_grad_hook(step_in_backward)
for n in range(9):
    model(torch.ones(4)).sum().backward()
""",
        "the step is made inside backward, which cannot be undone",
    ),
    (
        "model.odd = nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False)\n" + FOR,
        "Linear.odd is a Parameter on cpu, laid out as torch.sparse_coo; only dense tensors on CPU "
        "or CUDA can be saved",
    ),
    (
        "optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)\n"
        "optimizer.param_groups[0]['params'][0].grad = torch.ones(3)\n"
        "for n in range(9):\n    optimizer.step()\n",
        "SGD trains tensors that are no parameters of a module: copies of the weights may be kept "
        "elsewhere, and a rollback would miss them",
    ),
]


@pytest.mark.parametrize(("code", "reason"), UNSAVED)
def test_weights_that_cannot_be_restored_are_not_saved(jobs, code, reason):
    result, events = jobs.run(PREAMBLE + code + "print(json.dumps('done'))\n", every=2)
    assert result == "done"
    assert len(of_kind(events, "refused")) >= 2 and set(of_kind(events, "refused")) == {reason}
    assert events[-1] == {"end": []}


CHANGED = [
    (FOR, 0, "there is no savepoint before step 0; the oldest is of step 0"),
    (
        # A new one at the address of the old one, which is all that an id tells.
        "optimizer.add_param_group({'params': [model.spare]})\n"
        "spare, ones = optimizer.param_groups[1]['params'], torch.ones(2)\n"
        + FOR
        + """    if n == 6:
        number, spare[0] = id(spare[0]), None
        del model.spare
        made = [nn.Parameter(ones)]
        while id(made[-1]) != number and len(made) < 9999:
            made.append(nn.Parameter(ones))
        spare[0] = made[-1]
""",
        7,
        "the parameters of AdamW were replaced since the savepoint",
    ),
    (
        FOR + "    if n == 6: model.weight = nn.Parameter(torch.zeros(1, 4))\n",
        7,
        "Linear.weight was replaced since the savepoint",
    ),
]


@pytest.mark.parametrize(("code", "before", "reason"), CHANGED)
def test_a_rollback_that_is_refused_changes_nothing(jobs, code, before, reason):
    code = PREAMBLE + "model.spare = nn.Parameter(torch.zeros(2))\n" + code
    code += "print(json.dumps([p.tolist() for p in model.parameters()]))\n"
    result, events = jobs.run(code, every=5, rollbacks=[rollback(7, before)])
    refusal = of_kind(events, "refused")[0]
    assert reason in refusal
    assert result == jobs.run(code)[0]
