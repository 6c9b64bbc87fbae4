"""supervise: the outer watchdog of a training run."""

__version__ = "0.1.0"
