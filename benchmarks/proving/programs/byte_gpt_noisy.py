"""2: a byte GPT with four short sequences a batch: its loss is noisy; a `while` loop."""

import torch
from common import ByteGPT, arguments, save, text, windows
from torch.nn import functional as F

options = arguments(800, rows=4, rate=2e-3)
generator = torch.Generator().manual_seed(options.seed)
source, model = text(), ByteGPT()
optimizer = torch.optim.Adam(model.parameters(), lr=options.rate, betas=(0.9, 0.95))

step = 0
while step < options.steps:
    for group in optimizer.param_groups:
        group["lr"] = options.rate * min(1.0, (step + 1) / 50)
    inputs, targets = windows(source, options.rows, 64, generator)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    save(options, step, model=model.state_dict(), optimizer=optimizer.state_dict())
    step += 1

held_out = windows(source, 256, 64, torch.Generator().manual_seed(12345))
with torch.no_grad():
    final = F.cross_entropy(model(held_out[0]).flatten(0, 1), held_out[1].flatten())
print(f"final_loss {final:.5f}")
