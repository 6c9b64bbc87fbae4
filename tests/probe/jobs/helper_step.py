"""The step in a helper with a closure; a scheduler; gradients zeroed in place or left to add."""

import hashlib
import json
import sys

import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

which, zeroing = sys.argv[1], sys.argv[2]


def make_scheduler(optimizer):
    if which == "plateau":
        return schedulers.ReduceLROnPlateau(optimizer, patience=1, factor=0.7)
    return schedulers.SequentialLR(
        optimizer,
        [schedulers.ConstantLR(optimizer, 0.5, 6), schedulers.CosineAnnealingLR(optimizer, 30)],
        [6],
    )


def main():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
    late = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW([*model.parameters(), *late.parameters()], lr=0.02)
    scheduler = make_scheduler(optimizer)
    position = 0
    data = torch.randn(512, 4)

    def train_step(rate_note):
        nonlocal position
        x = data[position : position + 8]
        position = (position + 8) % 512
        output = model(x) + (late(x) if position > 120 else 0)
        loss = (output - x.prod(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        if zeroing == "in_place":
            optimizer.zero_grad(set_to_none=False)
        elif zeroing == "seldom" and position % 32 == 0:
            optimizer.zero_grad()
        value = loss.item()
        rate_note.append(optimizer.param_groups[0]["lr"])
        return value

    losses, rates, step = [], [], 0
    while step < 30:
        value = train_step(rates)
        losses.append(value)
        scheduler.step(value) if which == "plateau" else scheduler.step()
        step += 1
    tensors = [p.detach() for p in (*model.parameters(), *late.parameters())]
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors))
    print(json.dumps({"losses": losses, "sha": digest.hexdigest(), "also": rates}))


if __name__ == "__main__":
    sys.exit(main())
