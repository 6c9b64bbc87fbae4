"""Trials of policies away from a run: scenarios, back-tests, and the conditions of a rule."""
