"""Facts of a training library: epoch, evaluation, checkpoints, the planned length of the run.

An adapter stands beside functions that the library calls anyway, and says to `TrainerListener` what
passes by. One file per library; none is read before the job imports the library. Everything that
the probe measures itself comes from torch, with or without an adapter.
"""
