"""A save of the job at a moment in which one more forward would break what comes after."""

import pytest

SAVES = """
import functools

kind = os.environ["KIND"]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 16), nn.Linear(16, 3), nn.Dropout(0.3)
        self.register_buffer("scale", torch.ones(1))
        self.cache = torch.zeros(32)

    def forward(self, x):
        if kind == "inference":
            x = x * ones(len(x))
        if kind == "between":
            self.scale *= 1.001
        if kind == "resize":
            self.cache.resize_(len(x) * 4)
        return self.b(self.drop(torch.tanh(self.a(x)))) * self.scale

@functools.lru_cache(None)
def ones(rows):
    return torch.ones(rows, 1)

def save():
    torch.save(model.state_dict(), "ckpt.pt")

model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(24):
    rows = 2 if step > 20 else 8
    loss = F.cross_entropy(model(torch.randn(rows, 4)), torch.randint(0, 3, (rows,)))
    optimizer.zero_grad()
    if kind == "between" and step in (10, 20):
        save()
    loss.backward()
    optimizer.step()
    if step in (10, 20) and kind != "between":
        model.eval()
        with torch.inference_mode(kind == "inference"):
            save()
        emit(training=[module.training for module in model.modules()])
        model.train()
finish(model)
"""


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("between", "a forward of the training has not had its backward"),
        ("inference", "what a forward keeps in inference mode cannot be trained with"),
        ("resize", None),
    ],
)
def test_a_save_is_no_time_for_what_would_break_the_training(probed, bare, kind, why):
    """Buffers that a graph holds; caches that only inference may use; tensors that shrink."""
    job = probed.run(SAVES, environ={"KIND": kind}, probe_batch={})
    told = [n.data["probe_batch"] for n in job.notices if n.kind == "checkpoint-saved"]
    assert len(told) == 2 and all(each.get("why") == why for each in told), told
    assert job.output == bare.run(SAVES, environ={"KIND": kind}).output
