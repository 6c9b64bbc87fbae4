"""torch.compile of the model and of the optimizer's step; slow, so `make chaos` runs it."""

import pytest

pytestmark = pytest.mark.chaos

LOOP = """
import warnings
warnings.filterwarnings("ignore", module="torch")    # what a compiler says of torch itself

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, y):
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())

model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
whole = torch.compile(model, backend="aot_eager", fullgraph=True)
update = torch.compile(optimizer.step, backend="aot_eager")
book = Ledger(optimizer)
step = 0
while step < 7:
    rows = torch.randint(0, 40, (4, 9))
    loss = whole(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    optimizer.zero_grad()
    loss.backward()
    book.before(train_loss_raw=loss.item(), grad_global_norm=book.gradient(),
                **({} if step == 0 else {"tokens_per_update": 32}))
    update()
    book.after()
    step += 1
from torch._dynamo.utils import counters
emit(note=[counters['stats']['unique_graphs'], sum(counters['recompiles'].values())])
finish(model)
"""


def test_compiled(pair):
    """Every number as without a compiler, and the same weights with the probe and without.

    The loss function is out of sight in compiled code; the model's own input is counted instead,
    from the second step on: which model is trained is known when its optimizer first steps.
    """
    pair.run(LOOP)


SCALED = """
import warnings
warnings.filterwarnings("ignore", module="torch")
from torch._dynamo.utils import counters
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

def train(x):
    loss = model(x).pow(2).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return loss

fast = torch.compile(train, backend="aot_eager")
for step in range(5):
    loss = fast(torch.randn(16, 8))
    emit(train_loss_raw=loss.item(), loss_scale=8.0)
    model.zero_grad()
emit(note=[counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())])
finish(model)
"""


def test_a_compiled_step_with_a_scaler(pair):
    """No frame of ours is compiled: the graphs and their breaks are those of the job alone."""
    pair.run(SCALED)
