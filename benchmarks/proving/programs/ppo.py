"""10: PPO with a value loss on a made cart-and-pole; healthy only."""

import torch
from common import arguments
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

options = arguments(480, rows=32, rate=1e-3)
body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
policy, value = nn.Linear(64, 2), nn.Linear(64, 1)
model = nn.ModuleList([body, policy, value])
optimizer = torch.optim.Adam(model.parameters(), lr=options.rate, eps=1e-5)


def forward(state, action):
    """Return the next states (rows, 4) of a cart that is pushed left or right, and who fell."""
    x, speed, angle, turn = state.unbind(-1)
    force = action * 20.0 - 10.0
    push = (force + 0.05 * turn.square() * angle.sin()) / 1.1
    spin = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    state = torch.stack(
        [
            x + 0.02 * speed,
            speed + 0.02 * (push - 0.05 * spin * angle.cos() / 1.1),
            angle + 0.02 * turn,
            turn + 0.02 * spin,
        ],
        -1,
    )
    return state, (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.21)


def fresh(rows):
    return 0.1 * (torch.rand(rows, 4) - 0.5)


state, step = fresh(options.rows), 0
while step < options.steps:
    states, actions, odds, ends, values = [], [], [], [], []
    with torch.no_grad():
        for _ in range(32):
            features = body(state)
            choice = Categorical(logits=policy(features))
            action = choice.sample()
            states.append(state)
            actions.append(action)
            odds.append(choice.log_prob(action))
            values.append(value(features).squeeze(-1))
            state, fell = forward(state, action)
            state = torch.where(fell[:, None], fresh(options.rows), state)
            ends.append(fell.float())
        later, gain, gains = value(body(state)).squeeze(-1), 0.0, []
        for fell, worth in zip(reversed(ends), reversed(values), strict=True):
            gain = 1.0 + 0.99 * later * (1 - fell) - worth + 0.95 * 0.99 * (1 - fell) * gain
            later = worth
            gains.append(gain)
    s, a, o = torch.cat(states), torch.cat(actions), torch.cat(odds)
    advantage = torch.cat(gains[::-1])
    returns = advantage + torch.cat(values)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    for _ in range(4):
        for rows in torch.randperm(len(s)).chunk(4):
            features = body(s[rows])
            choice = Categorical(logits=policy(features))
            ratio = (choice.log_prob(a[rows]) - o[rows]).exp()
            clipped = ratio.clamp(0.8, 1.2)
            gained = torch.minimum(ratio * advantage[rows], clipped * advantage[rows]).mean()
            wrong = F.mse_loss(value(features).squeeze(-1), returns[rows])
            loss = -gained + 0.5 * wrong - 0.01 * choice.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            step += 1
print(f"final_loss {loss.item():.5f}")
