"""The smallest possible Python probe: the lower bound of the cost per step.

One flat function stands around each of five calls: the model, its loss, the backward, the clip and
the optimizer's step. Together they read the basic facts of a step, the loss, the gradient norm, the
rates, which batch it was, how many targets it had and how long each part took, and pack them with a
checksum into a ring. Nothing is guarded, nothing derived; other threads, tracers, micro-batches and
commands are not thought of. `overhead.py` measures it beside the real probe.
"""

from __future__ import annotations

import mmap
import struct
from ctypes import c_char, string_at
from time import monotonic_ns as now
from typing import Any
from zlib import crc32

import torch

SLOTS = 4096
FACTS = 9  # and the rates
PIECES, PIECE = 4, 128  # bytes of the batch that are hashed
IGNORED = (-100).to_bytes(8, "little", signed=True)  # torch's `ignore_index`, as it lies in memory
Piece = c_char * PIECE


class Floor:
    """The smallest possible probe of a process.

    Attributes:
        on: when false, every function passes its call on.
        own: what it took itself in each step, in seconds of wall time.
    """

    def __init__(self) -> None:
        self.on = False
        self.own: list[float] = []

    def install(self, model: Any, optimizer: Any) -> None:
        """Wrap the calls of these two, and torch's own functions."""
        functional, utils, autograd = torch.nn.functional, torch.nn.utils, torch.autograd
        run_model = model._compiled_call_impl or model._call_impl
        run_loss, run_backward = functional.cross_entropy, autograd.backward
        run_clip, run_step = utils.clip_grad_norm_, type(optimizer).step
        frame = struct.Struct(f"@IIQ{FACTS + len(optimizer.param_groups)}d")
        ring = mmap.mmap(-1, SLOTS * frame.size)
        slot = bytearray(frame.size)
        body, checksum = memoryview(slot)[4:], memoryview(slot).cast("I")

        inputs = targets = None
        loss_value = norm_value = 0.0
        batch = tokens = forward_ns = backward_ns = ended_ns = own_ns = number = 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal inputs, forward_ns, own_ns
            if not self.on:
                return run_model(*args, **kwargs)
            entered = now()
            inputs = args[0]
            began = now()
            try:
                return run_model(*args, **kwargs)
            finally:
                ended = now()
                forward_ns = ended - began
                own_ns += began - entered + now() - ended

        def loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal targets
            if self.on:
                targets = target
            return run_loss(input, target, *args, **kwargs)

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal loss_value, batch, tokens, backward_ns, own_ns
            if not self.on:
                return run_backward(tensors, *args, **kwargs)
            entered = now()
            loss_value = tensors.item()
            at, stride = inputs.data_ptr(), inputs.numel() * 8 // PIECES
            batch = 0
            for start in range(at, at + PIECES * stride, stride):
                batch = crc32(Piece.from_address(start), batch)
            size = targets.numel()
            tokens = size - string_at(targets.data_ptr(), 8 * size).count(IGNORED)
            began = now()
            try:
                return run_backward(tensors, *args, **kwargs)
            finally:
                ended = now()
                backward_ns = ended - began
                own_ns += began - entered + now() - ended

        def clip(*args: Any, **kwargs: Any) -> Any:
            nonlocal norm_value, own_ns
            norm = run_clip(*args, **kwargs)
            if self.on:
                entered = now()
                norm_value = norm.item()
                own_ns += now() - entered
            return norm

        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal ended_ns, own_ns, number
            if not self.on:
                return run_step(optimizer, *args, **kwargs)
            entered = now()
            rates = [group["lr"] for group in optimizer.param_groups]
            began = now()
            result = run_step(optimizer, *args, **kwargs)
            ended = now()
            step_ns, ended_ns = ended - ended_ns, ended
            frame.pack_into(
                slot,
                0,
                0,
                number,
                ended,
                loss_value,
                norm_value,
                batch,
                tokens,
                forward_ns / 1e9,
                backward_ns / 1e9,
                (ended - began) / 1e9,
                step_ns / 1e9,
                (step_ns - forward_ns - backward_ns) / 1e9,
                *rates,
            )
            checksum[0] = crc32(body)
            at = number % SLOTS * frame.size
            ring[at : at + frame.size] = slot
            number += 1
            self.own.append((own_ns + began - entered + now() - ended) / 1e9)
            own_ns = 0
            return result

        model._compiled_call_impl = forward  # hooks would be slower
        functional.cross_entropy, autograd.backward = loss, backward
        utils.clip_grad_norm_, type(optimizer).step = clip, step
