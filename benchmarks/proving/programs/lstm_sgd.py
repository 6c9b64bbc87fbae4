"""3: a word-level style LSTM with plain SGD, truncated back-propagation, clipping; epochs."""

import torch
from common import arguments, save, text
from torch import nn
from torch.nn import functional as F

options = arguments(600, rows=16, rate=4.0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 48)
        self.lstm = nn.LSTM(48, 96, batch_first=True)
        self.head = nn.Linear(96, 256)

    def forward(self, x, state):
        y, state = self.lstm(self.embedding(x), state)
        return self.head(y), state


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=options.rate)
source = text()[options.seed * 1000 :][: options.rows * 24 * 200 + 1]
rows = source[:-1].view(options.rows, -1)
targets = source[1:].view(options.rows, -1)

step, epoch = 0, 0
while step < options.steps:
    state = None
    for at in range(0, rows.shape[1] - 23, 24):
        if step >= options.steps:
            break
        logits, state = model(rows[:, at : at + 24], state)
        state = tuple(part.detach() for part in state)
        loss = F.cross_entropy(logits.flatten(0, 1), targets[:, at : at + 24].flatten())
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        save(options, step, model=model.state_dict(), optimizer=optimizer.state_dict())
        step += 1
    epoch += 1

with torch.no_grad():
    final = F.cross_entropy(model(rows, None)[0].flatten(0, 1), targets.flatten())
print(f"final_loss {final:.5f}")
