"""Gradient accumulation with everything that goes with it, at once."""

# Mixed precision, a scaler, an overflow, clipping, padding, a schedule, a last round that is short.
AMP = """
torch.manual_seed(1)
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 50))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11, growth_interval=6)
book = Ledger(optimizer)
step = 0
while step < 14:
    pass_by(step)
    micro = 2 if step == 9 else 4
    rows = [torch.randint(0, 50, (4, 9)) for _ in range(micro)]
    masks = [torch.rand(4, 8) < 0.3 for _ in range(micro)]
    total = sum(int((~mask).sum()) for mask in masks)
    told = 0.0
    for k in range(micro):
        x, y = rows[k][:, :-1], rows[k][:, 1:].masked_fill(masks[k], -7)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), ignore_index=-7,
                                   reduction="sum") / total
        told += loss.item()
        broken = model[1].weight.register_hook(lambda g: g * (math.inf if step == 5 else 1))
        scaler.scale(loss).backward()
        broken.remove()
    scale = scaler.get_scale()
    if step % 2:
        scaler.unscale_(optimizer)
        true = book.gradient()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    else:
        true = book.gradient() / scale
    book.before(train_loss_raw=told, grad_global_norm=true, tokens_per_update=total,
                loss_scale=scale, update_skipped=float(step == 5))
    scaler.step(optimizer)
    scaler.update()
    book.after()
    optimizer.zero_grad()
    schedule.step()
    step += 1
finish(model)
"""


def test_accumulation_under_a_scaler(pair):
    """Each frame is what its author would have computed for the whole update, in float64."""
    job = pair.run(AMP)
    assert [f["step"] for f in job.frames if f["update_norm"] == 0] == [5]
    assert job.frames[-1]["steps_seen"] == 13 and job.frames[-1]["skipped_updates"] == 1
    assert set(job.column("nan_inf_events")) == {0}

    pair.check_rollback(AMP, at=11, to=8)
