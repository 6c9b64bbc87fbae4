"""Shared memory between this process and the supervisor: frames out, commands in."""
