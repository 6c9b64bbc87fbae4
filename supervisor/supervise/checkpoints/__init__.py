"""Finds the job's checkpoints, verifies them, keeps good ones safe, and puts them back."""
