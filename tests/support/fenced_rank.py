"""Ranks without torch: the commands of a real probe over a real segment, in lockstep.

Run as `python fenced_rank.py FOLDER WORLD STEP_S {"RANK": ["FAULT", STEP]}`, which starts WORLD
ranks with segments in FOLDER/shm, or with a rank behind that as one of them. A rank ends a step
when all have begun it, as an all-reduce would have it. What it carries out goes into
FOLDER/log.RANK, a line `step verb value` each. Faults in a step: `astray` counts a step that the
others do not make, `dies` kills the rank, `shadows` lets it end no further step and take part in
all collectives, as a rank does whose data has come to its end. Faults when the command of this
number arrives, before it is read: `stops`, `sleeps` for `AWAY_S`, and `evaluates` for as long.
A rank that `misses` reads each of the first so many one step too late. A rank that `asks` does so
for a shard at each step. The frames of one that `lags` wait for a device from a step on.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from supervise_probe import wire
from supervise_probe.collectors import QuarantineCollector as Quarantine
from supervise_probe.context import Config, Reporter
from supervise_probe.ipc.commands import Commands
from supervise_probe.ipc.segment import Mailbox, Writer
from supervise_probe.runtime import Guard


class Rate:
    """Writes down what is asked of it."""

    hold = None
    warming = SimpleNamespace(moves=False)

    def __init__(self, position, log):
        self._position, self._log = position, log
        self.held = SimpleNamespace(now=1.0)

    def factor(self):
        return self.held.now

    def start_scale(self, value, steps, step):
        self.held.now = value
        os.write(self._log, f"{self._position.step - 1} lr_scale {value!r}\n".encode())


class NoSavepoints:
    """Would go back, but has nothing to go back to."""

    def can_rollback(self, args):
        return {"steps": []}

    def do_rollback(self, args):
        raise AssertionError("carried out, though the ranks could not agree on a step")


class Interrupted(Mailbox):
    """One whose rank turns to something else when the command of a number arrives."""

    def __init__(self, writer, fault, number, reporter, position):
        super().__init__(writer)
        self._fault, self._number, self._reporter = fault, number, reporter
        self._position, self._keys, self._late = position, [], []

    def poll(self):
        found = super().poll()
        if self._fault == "misses":
            return self._read_late(found)
        for command in found:
            key = command.args.get("key", command.key)
            if key not in self._keys:
                self._keys.append(key)
                if len(self._keys) == self._number:
                    self._turn_away()
        return found

    def _read_late(self, arrived):
        for command in arrived:
            self._keys.append(command.key)
            if len(self._keys) <= self._number:
                self._late.append(command)
        past = [each for each in self._late if each.args["step"] < self._position.step - 1]
        self._late = [each for each in self._late if each not in past]
        return past + [command for command in arrived if command not in self._late + past]

    def _turn_away(self):
        if self._fault == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self._fault in ("sleeps", "evaluates"):
            if self._fault == "evaluates":
                self._reporter.beat("eval")
            time.sleep(AWAY_S)
            self._reporter.beat("step")


class Lockstep:
    """How many steps each rank has begun, in memory that all share."""

    def __init__(self, path, rank, world):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, 8 * world)
        self._map, self._rank, self._world = mmap.mmap(fd, 8 * world), rank, world
        os.close(fd)
        self.made = 0

    def meet(self):
        """Take part in a collective of all."""
        self.made += 1
        struct.pack_into("=Q", self._map, 8 * self._rank, self.made)
        while min(struct.unpack_from(f"={self._world}Q", self._map)) < self.made:
            time.sleep(0.0002)


def ask(held, position, log, known=[False]):  # noqa: B006
    """Write down when the answer to whether a shard is in quarantine is another one."""
    if held.is_quarantined("a.tar") != known[0]:
        known[0] = not known[0]
        os.write(log, f"{position.step - 1} quarantined {known[0]}\n".encode())


STEPS = 100_000
AWAY_S = 1.5


def main():
    folder, world, step_s, faults, *which = sys.argv[1:]
    if not which:
        command = [sys.executable, *sys.argv]
        gang = [subprocess.Popen([*command, str(rank)]) for rank in range(int(world))]
        sys.exit(max(abs(rank.wait()) for rank in gang))
    run_rank(Path(folder), int(world), float(step_s), json.loads(faults), int(which[0]))


def run_rank(folder, world, step_s, faults, rank):
    fault, at = faults.get(str(rank), ("", -1))
    shm, log = str(folder / "shm"), folder / f"log.{rank}"
    position = SimpleNamespace(rank=rank, world_size=world, step=0, attempt=0, held_ns=0)
    lockstep = Lockstep(folder / "lockstep", rank, world)
    group = SimpleNamespace(_get_sequence_number_for_group=lambda: lockstep.made)
    torch = SimpleNamespace(distributed=SimpleNamespace(GroupMember=SimpleNamespace(WORLD=group)))
    writer = Writer.create(shm, "run", rank, world, slots=256)
    reporter = Reporter(position)
    mailbox = Interrupted(writer, fault, at, reporter, position)
    reporter.connect(writer, mailbox, {name: i for i, name in enumerate(wire.PHASES)}, dict)
    guard = Guard(lambda part, why: sys.exit(f"{part.name} is off: {why}"))
    context = SimpleNamespace(
        torch=torch,
        guard=guard,
        position=position,
        reporter=reporter,
        config=Config("run", shm, shm),
        scalars=None,
    )
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    optimizers = SimpleNamespace(living=list, known={})
    commands = Commands(context, mailbox, Rate(position, out), optimizers, list, str)
    held = Quarantine(context, SimpleNamespace(on_device=False), SimpleNamespace(shards=None))
    commands.register(held, NoSavepoints())
    writer.announce(["train_loss_raw"])
    reporter.beat("step")
    while position.step < STEPS:
        time.sleep(step_s)
        if position.step == at and fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        while position.step >= at and fault == "shadows":
            writer.write_collective(lockstep.made, 0, True)
            lockstep.meet()
        lockstep.meet()
        if position.step == at and fault == "astray":
            position.step += 1
        if fault != "lags" or position.step < at:
            writer.publish(position.step, 0, [2.5], time.monotonic_ns())
        position.step += 1
        reporter.beat("step")
        commands.fetch()
        commands.run()
        if fault == "asks":
            ask(held, position, out)


main()
