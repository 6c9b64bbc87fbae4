"""Decisions to the world. Nothing here decides."""
