"""Carrying out a runbook: its steps, which checkpoint, and whether it helped."""
