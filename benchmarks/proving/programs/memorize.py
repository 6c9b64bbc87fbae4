"""7: fine-tuning on 64 short sequences until the loss is near 1e-3, at a constant small rate."""

import torch
from common import ByteGPT, arguments, save, text, windows
from torch.nn import functional as F

options = arguments(600, rows=16, rate=1e-3)
generator = torch.Generator().manual_seed(options.seed)
inputs, targets = windows(text(), 64, 24, generator)
model = ByteGPT(width=96)
optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.0)

for step in range(options.steps):
    if step % 4 == 0:
        order = torch.randperm(64, generator=generator)
    rows = order[step % 4 * 16 :][: options.rows]
    logits = model(inputs[rows])[:, 8:]  # the first bytes are the prompt
    loss = F.cross_entropy(logits.flatten(0, 1), targets[rows, 8:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    save(options, step, model=model.state_dict(), optimizer=optimizer.state_dict())

with torch.no_grad():
    final = F.cross_entropy(model(inputs)[:, 8:].flatten(0, 1), targets[:, 8:].flatten())
print(f"final_loss {final:.5f}")
