"""1: a byte GPT with a large batch, AdamW, warm-up and cosine; a `for` loop."""

import torch
from common import ByteGPT, arguments, save, text, warmup_cosine, windows
from torch.nn import functional as F

options = arguments(600, rows=48, rate=2e-3)
generator = torch.Generator().manual_seed(options.seed)
source, model = text(), ByteGPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: warmup_cosine(s, options.steps))

for step in range(options.steps):
    inputs, targets = windows(source, options.rows, 48, generator)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    save(options, step, model=model.state_dict(), optimizer=optimizer.state_dict())

held_out = windows(source, 256, 48, torch.Generator().manual_seed(12345))
with torch.no_grad():
    final = F.cross_entropy(model(held_out[0]).flatten(0, 1), held_out[1].flatten())
print(f"final_loss {final:.5f}")
