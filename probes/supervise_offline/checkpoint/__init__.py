"""Verifies checkpoints: one JSON object on standard input, one JSON line per answer."""
