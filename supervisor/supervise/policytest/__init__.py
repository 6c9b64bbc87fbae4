"""Scenarios played through the engine that runs live: what came of them, and what they cover."""
