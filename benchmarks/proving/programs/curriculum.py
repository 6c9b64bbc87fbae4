"""17: sequence length doubles at a third of the run, and the data mix changes at two thirds."""

import torch
from common import ByteGPT, arguments, save, text, windows
from torch.nn import functional as F

options = arguments(600, rows=12, rate=2e-3)
generator = torch.Generator().manual_seed(options.seed)
source, model = text(), ByteGPT()
digits = torch.randint(48, 58, (200_000,), generator=generator)  # the second source: random digits
optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)

for step in range(options.steps):
    length = 32 if step < options.steps // 3 else 64
    for group in optimizer.param_groups:
        group["lr"] = options.rate * min(1.0, (step + 1) / 40, 4 * (1 - step / options.steps))
    inputs, targets = windows(source, options.rows, length, generator)
    if step >= options.steps * 2 // 3:  # a quarter of the rows from the second source
        part = windows(digits, options.rows // 4, length, generator)
        inputs[: options.rows // 4], targets[: options.rows // 4] = part
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    save(options, step, model=model.state_dict(), optimizer=optimizer.state_dict())

held_out = windows(source, 256, 64, torch.Generator().manual_seed(12345))
with torch.no_grad():
    final = F.cross_entropy(model(held_out[0]).flatten(0, 1), held_out[1].flatten())
print(f"final_loss {final:.5f}")
