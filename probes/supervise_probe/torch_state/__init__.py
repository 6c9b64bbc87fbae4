"""The job's modules, optimizers, schedulers and batches, as torch shows them."""
