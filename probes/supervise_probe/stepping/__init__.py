"""Which calls of the job make one training step, and when it is over."""
