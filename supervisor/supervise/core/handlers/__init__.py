"""Handlers of the engine, one file per kind of event."""
