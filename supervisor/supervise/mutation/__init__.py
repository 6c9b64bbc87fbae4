"""Mutation testing of policies: one change at a time, until a scenario detects it."""
