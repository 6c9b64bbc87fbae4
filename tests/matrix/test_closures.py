"""LBFGS: the gradients arise inside the step, and more than once."""

import pytest

pytestmark = pytest.mark.slow

SEARCH = """
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=5, history_size=4,
                              line_search_fn="strong_wolfe")
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
x, y = torch.randn(64, 6), torch.randint(0, 3, (64,))
book = Ledger(optimizer)
step = 0
while step < 8:
    pass_by(step)
    evaluations = []

    def closure():
        optimizer.zero_grad()
        total = 0.0
        for part in range(2):                      # the closure accumulates
            half = slice(32 * part, 32 * part + 32)
            loss = F.cross_entropy(model(x[half]), y[half]) / 2
            loss.backward()
            total = total + loss.detach()
        true = book.gradient()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        evaluations.append((total.item(), true))
        return total

    book.before()
    returned = optimizer.step(closure)
    first = evaluations[0]
    book.after(train_loss_raw=first[0], grad_global_norm=first[1], tokens_per_update=64)
    schedule.step()
    emit(note=[len(evaluations), float(returned)])
    step += 1
finish(model)
"""


def test_a_line_search_is_one_step(pair):
    """However often it evaluates: loss, gradient and tokens are those of the first evaluation."""
    job = pair.run(SEARCH)
    assert max(row["note"][0] for row in job.output if "note" in row) > 5

    again, answer = pair.back(SEARCH, at=6, to=5)
    assert answer.ok, answer.error
    assert again.output[-1] == job.output[-1]
