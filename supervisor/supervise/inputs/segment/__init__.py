"""The probes' segments as events."""
