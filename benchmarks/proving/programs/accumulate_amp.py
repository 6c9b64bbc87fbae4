"""11: eight micro-batches an update, autocast to bfloat16, a gradient scaler."""

import torch
from common import ByteGPT, arguments, save, text, warmup_cosine, windows
from torch.nn import functional as F

options = arguments(300, rows=4, rate=2e-3)
generator = torch.Generator().manual_seed(options.seed)
source, model = text(), ByteGPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=100)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: warmup_cosine(s, options.steps))

for step in range(options.steps):
    for _ in range(8):
        inputs, targets = windows(source, options.rows, 32, generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()) / 8
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    schedule.step()
    save(options, step, model=model.state_dict(), optimizer=optimizer.state_dict())

held_out = windows(source, 256, 32, torch.Generator().manual_seed(12345))
with torch.no_grad():
    final = F.cross_entropy(model(held_out[0]).flatten(0, 1), held_out[1].flatten())
print(f"final_loss {final:.5f}")
