"""Several ranks: DDP and FSDP2 over gloo, under torchrun, and as processes that the job forks."""

import json
import math

import pytest

from supervise.core import combine_rank_values
from tests.support import probed_job
from tests.support.probed_job import check_frames, rank_jobs

from .conftest import PREAMBLE

BEGIN = '''
import atexit, hashlib, warnings
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:                    # nothing in the environment tells one rank from the other
    rank = 0 if os.fork() else 1
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank,
                            world_size=2)
rank = dist.get_rank()
told = open(f"told-{rank}", "w")
torch.manual_seed(0)
whole = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 32))
torch.manual_seed(1 + rank)   # each rank its own data


def emit(**values):
    told.write(json.dumps(values) + "\\n")


def batch(size):
    y = torch.randint(0, 32, (size, 8))
    y[:, 0] = -100
    return torch.randint(0, 32, (size, 8)), y


def local(tensors):
    return [getattr(t, "_local_tensor", t).detach() for t in tensors]


def step(model, optimizer, several):
    """Two micro-batches, the second one longer, and what a frame is to say of them."""
    params, total = list(model.parameters()), 0.0
    for part in range(several):
        x, y = batch(2 + part)
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = part == several - 1
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / several
        loss.backward()
        total += loss.item()
    if rank == 1:
        time.sleep(0.02)      # a slow rank: nobody may wait for anything but the job's own calls
    whole = norm(getattr(p.grad, "full_tensor", lambda: p.grad)() for p in params)
    true, old = norm(local(p.grad for p in params)), [t.clone() for t in local(params)]
    if not isinstance(model, DistributedDataParallel):
        nn.utils.clip_grad_norm_(params, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    moved = norm(p - q for p, q in zip(local(params), old))
    copies = 2 if isinstance(model, DistributedDataParallel) else 1
    emit(train_loss_raw=total, grad_global_norm=true, job=whole, update_norm=moved,
         grad_norm_share=true / copies ** 0.5, update_square_share=moved ** 2 / copies,
         weight_square_share=norm(old) ** 2 / copies,
         tokens_per_update=sum(7 * (2 + part) for part in range(several)))


def descriptors():
    return len(os.listdir("/proc/self/fd"))
'''
END = """
told.close()
dist.barrier()
dist.destroy_process_group()
"""
SCRIPT = (
    BEGIN
    + """
model = DistributedDataParallel(whole)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for n in range(6):
    step(model, optimizer, 2)
    if n == 3:
        before = descriptors()
emit(note="descriptors", grown=descriptors() - before)
optimizer.zero_grad()
for layer in whole:
    if list(layer.parameters()):
        fully_shard(layer)
fully_shard(whole)
optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, foreach=True)
for n in range(6):
    step(whole, optimizer, 1)
digest = hashlib.sha256()
for value in whole.state_dict().values():
    digest.update(value.full_tensor().numpy().tobytes())
emit(note="sha", sha=digest.hexdigest(), dtensor=type(value).__name__)
emit(note="collectives", count=dist.distributed_c10d._get_default_group().
     _get_sequence_number_for_group())
"""
    + END
    + """
if "RANK" in os.environ:      # FSDP2 keeps gloo's threads, which may abort Python as it ends
    atexit._run_exitfuncs()
    os._exit(0)
"""
)


def told(job):
    files = [job.folder / f"told-{rank}" for rank in range(2)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.fixture(scope="module")
def untouched(pair):
    """The same ranks without a probe."""
    return told(pair.bare.run(SCRIPT))


def check(both, job, untouched):
    """One segment per rank, all frames right, nothing on the streams, nothing else changed."""
    assert [(each.segment().rank, each.segment().world_size) for each in both] == [(0, 2), (1, 2)]
    assert told(job) == untouched
    for each, rows in zip(both, untouched, strict=True):
        notes = {row["note"]: row for row in rows if "note" in row}
        assert notes["descriptors"]["grown"] == 0 and notes["sha"]["dtensor"] == "DTensor"
        steps = [{k: v for k, v in row.items() if k != "job"} for row in rows if "note" not in row]
        assert each.column("step") == list(range(12)) == list(range(len(steps)))
        check_frames(each.frames, steps, rel=1e-5)
        assert set(each.segment().status()["collectors"].values()) == {"on"}
    for step, row in enumerate(row for row in untouched[0] if "note" not in row):
        rows = {rank: each.frames[step] for rank, each in enumerate(both)}
        job = combine_rank_values(rows, 0, rows[0], 2)
        assert job["grad_global_norm"] == pytest.approx(row["job"], rel=1e-6)
        assert job["tokens_per_update"] == 2 * row["tokens_per_update"]
    first, second = (each.segment().collective() for each in both)
    assert first == second and first.name == "barrier" and not first.inside and first.number > 1
    norms = [[row["grad_global_norm"] for row in rows if "note" not in row] for rows in untouched]
    assert norms[0][:6] == norms[1][:6]  # DDP has averaged them
    assert norms[0][6:] != norms[1][6:]  # FSDP2: each rank knows its shard


def test_under_torchrun(launch, make_folder, untouched):
    folder = make_folder()
    (folder / "train.py").write_text(probed_job.PREAMBLE + PREAMBLE + SCRIPT)
    argv = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    job = launch(None, *argv, folder=folder)
    check(rank_jobs(job.folder), job, untouched)
    assert (folder / "out").read_text() == "" and not job.err.replace("\n", "")


def test_ranks_that_the_job_forks_are_told_apart(pair, untouched):
    """By their process group, where the environment says nothing."""
    job = pair.probed.run(SCRIPT)
    check(rank_jobs(job.folder), job, untouched)
    assert job.err == "" and (job.folder / "out").read_text() == ""


APART = (
    BEGIN
    + """
model = DistributedDataParallel(whole)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for n in range(8):
    step(model, optimizer, 1)
for layer in whole:
    if list(layer.parameters()):
        fully_shard(layer)
optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
step(whole, optimizer, 1)
"""
    + END
)


def test_replicas_that_drift_apart_are_seen_and_shards_are_not_compared(pair):
    """A drill lets them drift; another one feeds both the same batch, which is seen as well."""
    noise = {"fault": "weight_noise", "step": 4, "params": {"target": "vector"}, "rank": 1}
    same_batch = {"fault": "same_batch", "step": 4, "params": {"steps": 3}}
    sampling = {"checksums": 1, "share": 1.0}
    job = pair.probed.run(APART, sampling=sampling, drills=[noise, same_batch])
    frames = [each.frames for each in rank_jobs(job.folder)]
    digests = [[_digests(frame) for frame in each] for each in frames]
    same = [a == b for a, b in zip(*digests, strict=True) if a and b]
    assert same[0] and not same[-1] and sorted(same, reverse=True) == same
    assert {len(digest) for each in digests for digest in each} == {0, 5}
    assert digests[0][8] == digests[1][8] == {}
    inputs = [[frame.get("batch_fingerprint") for frame in each] for each in frames]
    same = [a == b for a, b in zip(*inputs, strict=True)]
    assert same[4:7] == [True] * 3 and not any(same[1:4])


def _digests(frame):
    return {name: value for name, value in frame.items() if name.startswith("param_digest.")}


PIPELINE = (
    BEGIN
    + """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

mine = whole[2 * rank:2 * rank + 2]
optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-2)
torch.manual_seed(3)      # both draw the same batches
for kind, mean in ((ScheduleGPipe, True), (Schedule1F1B, True), (ScheduleGPipe, False)):
    def loss_of(out, y):
        return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="mean" if mean else "sum")
    stage = PipelineStage(mine, rank, 2, torch.device("cpu"))
    schedule = kind(stage, n_microbatches=4, loss_fn=loss_of, scale_grads=mean)
    for n in range(4):
        (x, y), losses = batch(8), []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        params = list(mine.parameters())
        true, old = norm(local(p.grad for p in params)), [p.clone() for p in local(params)]
        nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        moved = norm(p - q for p, q in zip(local(params), old))
        loss = sum(part.item() for part in losses) / (4 if mean else 1)
        known = {"train_loss_raw": loss} if rank else {}
        emit(grad_global_norm=true, update_norm=moved, **known)
"""
    + END
)


def test_stages_of_a_pipeline(pair):
    """The last one knows the loss, averaged over micro-batches where their gradients are."""
    untouched = told(pair.bare.run(PIPELINE))
    job = pair.probed.run(PIPELINE)

    assert told(job) == untouched
    for rank, (each, rows) in enumerate(zip(rank_jobs(job.folder), untouched, strict=True)):
        assert each.column("step") == list(range(12)) == list(range(len(rows)))
        check_frames(each.frames, rows, rel=1e-5)
        assert all(("train_loss_raw" in frame) == (rank == 1) for frame in each.frames)
        assert set(each.segment().status()["collectors"].values()) == {"on"}
    assert job.err == ""


SHARDS = (
    BEGIN
    + """
from torch.distributed.fsdp import FullyShardedDataParallel

warnings.simplefilter("ignore")
cpu = {"device_id": torch.device("cpu")}
for wrap in (
    lambda module: FullyShardedDataParallel(module, **cpu),
    lambda module: FullyShardedDataParallel(module, use_orig_params=True, **cpu),
    fully_shard,
):
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)
    for n in range(3):
        x, y = batch(2)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        if isinstance(model, FullyShardedDataParallel):
            total = model.clip_grad_norm_(0.5)
        else:
            total = nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        emit(train_loss_raw=loss.item(), total=total.item())
"""
    + END
)


def test_the_norms_of_shards_add_up(pair):
    untouched = told(pair.bare.run(SHARDS))
    job = pair.probed.run(SHARDS)
    frames = [each.frames for each in rank_jobs(job.folder)]

    assert told(job) == untouched
    assert [len(each) for each in frames] == [9, 9]
    for both, rows in zip(zip(*frames, strict=True), zip(*untouched, strict=True), strict=True):
        total = math.hypot(*(frame["grad_global_norm"] for frame in both))
        assert math.isclose(total, rows[0]["total"], rel_tol=1e-5)
        for frame, row in zip(both, rows, strict=True):
            assert math.isclose(frame["train_loss_raw"], row["train_loss_raw"], rel_tol=1e-5)


UNLIKE = (
    BEGIN
    + """
def go(model, optimizer, times, masked=False, clips=False):
    x, y = batch(2)
    if masked and rank == 1:
        y[:] = -100              # a loss of NaN, and gradients of zero
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    (loss * (times if rank == 1 else 1.0)).backward()
    if clips:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    emit(same=hashlib.sha256(b"".join(t.numpy().tobytes() for t in local(whole.parameters())))
         .hexdigest(), finite=all(bool(t.isfinite().all()) for t in local(whole.parameters())))


model = DistributedDataParallel(whole)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for times, masked in ((1.0, False), (1.0, True), (float("nan"), False), (1.0, False)):
    go(model, optimizer, times, masked)
for layer in whole:
    if list(layer.parameters()):
        fully_shard(layer)
optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
go(whole, optimizer, 1.0, clips=True)
go(whole, optimizer, 1.0, clips=True)
go(whole, optimizer, 1.0)
"""
    + END
)


def test_ranks_skip_what_is_not_finite_together_or_not_at_all(pair):
    """Such as a batch that is masked to nothing, or an element of a shard, unless the clip by the
    norm of all shards brings it to all."""
    order = {"skip_nonfinite": {"max": 3, "per": 128}}
    drill = {"fault": "nan_grad", "params": {"alone": 1}, "rank": 0}
    drills = [{**drill, "step": 5}, {**drill, "step": 6}]
    job = pair.probed.run(UNLIKE, safeguards=order, drills=drills)
    both = rank_jobs(job.folder)

    skipped = [each.column("update_skipped") for each in both]
    assert skipped == [[0, 0, 1, 0, 0, 1, 0]] * 2
    assert math.isnan(both[1].frames[1]["train_loss_raw"])
    first, second = told(job)
    assert [row["same"] for row in first[:4]] == [row["same"] for row in second[:4]]
    assert [row["finite"] for row in first] == [True] * 6 + [False]
    assert [row["finite"] for row in second] == [True] * 7
