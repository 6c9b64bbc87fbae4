"""6: a convolutional network with batch norm, SGD with momentum, step decay."""

import torch
from common import arguments, images, save
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

options = arguments(600, rows=64, rate=0.05)


def layer(before: int, after: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()
    )


model = nn.Sequential(
    layer(1, 16, 1),
    layer(16, 32, 2),
    layer(32, 32, 2),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 10),
)
generator = torch.Generator().manual_seed(options.seed)
loader = DataLoader(TensorDataset(*images(6400, generator)), options.rows, shuffle=True)
held_out = images(1000, torch.Generator().manual_seed(12345))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(
    model.parameters(), lr=options.rate, momentum=0.9, weight_decay=5e-4, nesterov=True
)
schedule = torch.optim.lr_scheduler.MultiStepLR(
    optimizer, [options.steps // 2, options.steps * 3 // 4]
)

step = 0
while step < options.steps:
    model.train()
    for pictures, labels in loader:
        if step >= options.steps:
            break
        optimizer.zero_grad()
        loss = criterion(model(pictures), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
        save(options, step, model=model.state_dict(), optimizer=optimizer.state_dict())
        step += 1
model.eval()
with torch.no_grad():
    final = criterion(model(held_out[0]), held_out[1])
print(f"final_loss {final:.5f}")
