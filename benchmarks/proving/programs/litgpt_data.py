"""Bytes of the standard library as data for `litgpt pretrain`, which owns model and loop."""

from dataclasses import dataclass

import torch
from common import text, windows
from litgpt.data import DataModule
from torch.utils.data import DataLoader


class Loader(DataLoader):
    """With a state, as the loaders of litgpt's own data have: they go into its checkpoints."""

    given = skipped = 0

    def __iter__(self):
        for number, batch in enumerate(super().__iter__(), 1):
            if number > self.skipped:
                self.given = number
                yield batch
        self.given = self.skipped = 0

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.skipped = state["given"]


@dataclass
class Bytes(DataModule):
    """Spans of bytes, (rows, length + 1): litgpt takes inputs and targets out of them.

    Attributes:
        rows: spans of a pass over the data.
        seed: of the choice of the spans.
    """

    rows: int = 6400
    seed: int = 0
    batch_size: int = 16
    length: int = 48

    def connect(self, tokenizer=None, batch_size=16, max_seq_length=48):
        self.batch_size, self.length = batch_size, max_seq_length

    def _spans(self, rows, seed):
        generator = torch.Generator().manual_seed(seed)
        inputs, targets = windows(text(), rows, self.length, generator)
        return torch.cat([inputs, targets[:, -1:]], 1)

    def train_dataloader(self):
        return Loader(self._spans(self.rows, self.seed), self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self._spans(256, 12345), self.batch_size)
