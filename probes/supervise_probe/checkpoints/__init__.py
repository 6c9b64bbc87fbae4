"""Checkpoints in the job's own format: seen when they are saved, and written on demand."""
