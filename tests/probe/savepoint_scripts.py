"""Small training scripts for tests of savepoints."""

PREAMBLE = """
import hashlib, json, os, torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def train_step():
    loss = model(torch.ones(4)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()

"""

# 30 steps; per step the hash of all that updates change, the draw of the batch, the gradient that
# is left, and the scheduled rate. `AdamW` stands for an optimizer.
STATES = """
import hashlib, json, torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = AdamW
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 40)
result = {"states": [], "draws": [], "rates": [], "gradients": []}


def content(value):
    if torch.is_tensor(value):
        return value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return b"".join(str(key).encode() + content(v) for key, v in value.items())
    if isinstance(value, (list, tuple)):
        return b"".join(map(content, value))
    return repr(value).encode()


for step in range(30):
    x = torch.randn(8, 4)

    def closure():
        optimizer.zero_grad(set_to_none=False)
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    rate = optimizer.param_groups[0]["lr"]
    result["rates"].append(float(rate))
    schedule.step()
    held = [*model.state_dict().values(), *optimizer.state.values()]
    result["states"].append(hashlib.sha256(content(held)).hexdigest())
    result["draws"].append(x.flatten().tolist())
    result["gradients"].append(sum(p.grad.abs().sum().item() for p in model.parameters()))
print(json.dumps(result))
"""
