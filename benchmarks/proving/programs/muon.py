"""12: Muon for the matrices and SGD with momentum for the rest; linear decay to zero."""

import torch
from common import ByteGPT, arguments, save, text, windows
from torch.nn import functional as F

options = arguments(500, rows=16, rate=0.02)


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal by five Newton-Schulz steps (Jordan et al., 2024)."""

    def __init__(self, params, lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                buffer = state.setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(buffer, group["momentum"])
                x = x / (x.norm() + 1e-7)
                tall = x.shape[0] > x.shape[1]
                x = x.T if tall else x
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = x.T if tall else x
                scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.add_(x, alpha=-group["lr"] * scale)


generator = torch.Generator().manual_seed(options.seed)
source, model = text(), ByteGPT()
matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
ids = set(map(id, matrices))
rest = [p for p in model.parameters() if id(p) not in ids]
optimizers = [Muon(matrices, options.rate), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]
schedules = [
    torch.optim.lr_scheduler.LambdaLR(o, lambda s: max(0.0, 1 - s / options.steps))
    for o in optimizers
]

for step in range(options.steps):
    inputs, targets = windows(source, options.rows, 48, generator)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    for schedule in schedules:
        schedule.step()
    model.zero_grad(set_to_none=True)
    save(options, step, model=model.state_dict(), optimizers=[o.state_dict() for o in optimizers])

held_out = windows(source, 256, 48, torch.Generator().manual_seed(12345))
with torch.no_grad():
    final = F.cross_entropy(model(held_out[0]).flatten(0, 1), held_out[1].flatten())
print(f"final_loss {final:.5f}")
