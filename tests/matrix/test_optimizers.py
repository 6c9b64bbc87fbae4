"""Optimizers of every build, alone and two a step, each with the schedules that go with them."""

MODEL = """
inner = [nn.Linear(16, 16), nn.Linear(16, 16)]
model = nn.Sequential(
    nn.Embedding(40, 16), inner[0], nn.ReLU(), inner[1], nn.ReLU(), nn.Linear(16, 40)
)

def loss_of(rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
"""

# One after the other in one process, each on the model as the one before has left it.
BUILDS = (
    MODEL
    + """
builds = [
    torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True, amsgrad=True),
    torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    torch.optim.Adagrad(model.parameters(), lr=1e-3, fused=True),
    torch.optim.NAdam(model.parameters(), lr=1e-3, foreach=True),
    torch.optim.Adafactor(model.parameters(), lr=1e-3),
    torch.optim.RMSprop(model.parameters(), lr=torch.tensor(1e-3)),
]
while builds:
    optimizer = builds.pop(0)
    book = Ledger(optimizer)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(3):
        loss = loss_of(torch.randint(0, 40, (4, 9)))
        optimizer.zero_grad()
        loss.backward()
        book.before(train_loss_raw=loss.item(), grad_global_norm=book.gradient(),
                    tokens_per_update=32)
        optimizer.step()
        book.after()
        schedule.step()
finish(model)
"""
)


def test_fused_and_foreach_builds(pair):
    """Each build of an optimizer is measured alike, also where one takes the place of another."""
    job = pair.run(BUILDS)  # compares each number with the script's own
    assert len(job.frames) == 7 * 3


TWO = (
    MODEL
    + """
matrices = [layer.weight for layer in inner]
others = [p for p in model.parameters() if all(p is not m for m in matrices)]
muon = torch.optim.Muon(matrices, lr=2e-2, momentum=0.95)
adam = torch.optim.AdamW([{"params": others[:1], "lr": 1e-2}, {"params": others[1:]}], lr=3e-3)
book = Ledger(adam, muon)
schedules = [torch.optim.lr_scheduler.LambdaLR(muon, lambda n: min(1.0, (n + 1) / 4)),
             torch.optim.lr_scheduler.CosineAnnealingLR(adam, 20)]
step = 0
while step < 12:
    pass_by(step)
    loss = loss_of(torch.randint(0, 40, (4, 9)))
    loss.backward()
    true = book.gradient()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    book.before(train_loss_raw=loss.item(), grad_global_norm=true, tokens_per_update=32)
    adam.step()
    schedules[1].step()
    muon.step()
    book.after()
    schedules[0].step()
    model.zero_grad()
    step += 1
finish(model)
"""
)


def test_muon_and_adamw(pair):
    pair.run(TWO)
    pair.check_rollback(TWO, at=10, to=7)
