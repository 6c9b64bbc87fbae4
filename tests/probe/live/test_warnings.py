"""Warnings that a job causes come as often, and are told to come from the same lines, as ever."""

WARNS = """
import warnings

warnings.resetwarnings()
warnings.simplefilter("default")
warnings.showwarning = lambda message, category, filename, lineno, *_: emit(
    text=str(message)[:30], file=os.path.basename(filename), line=lineno)

class Rows(torch.utils.data.IterableDataset):
    def __len__(self):
        return 3

    def __iter__(self):
        return (torch.randint(0, 20, (8,)) for _ in range(4))  # one more than it says

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        logits = q @ k.transpose(-1, -2)
        flat = logits.view(-1, logits.size(-1))
        weights = F.softmax(flat) + F.softmax(flat, None, 3)
        return x + weights.view_as(logits) @ v

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.block = nn.Embedding(20, 16), Attention()
        self.head = nn.Linear(16, 20)

    def forward(self, x):
        warnings.warn("of the caller of the model", stacklevel=5)
        return self.head(self.block(self.table(x)))

def closure():
    warnings.warn("of the caller of the closure", stacklevel=5)
    loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    return loss

model = Model()
model.register_full_backward_hook(lambda *_: None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(Rows(), batch_size=1)
assert len(loader) == 3
for epoch in range(3):
    for x in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_((p for p in ()), 1.0)
        optimizer.step()
optimizer.step(closure)
finish(model)
"""


def test_each_warning_comes_once_and_from_its_own_line(probed, bare):
    job = probed.run(WARNS, sampling={"attention": 2, "share": 100})
    assert job.output == bare.run(WARNS).output
    assert len(job.frames) == 13 and len(job.output) == 9
    assert all(row["file"] == "train.py" for row in job.output[:-1])
