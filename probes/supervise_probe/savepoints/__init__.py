"""Savepoints: the state of the run in memory and on disk, and going back to one."""
