"""Boundaries of a training step in the job's calls."""
