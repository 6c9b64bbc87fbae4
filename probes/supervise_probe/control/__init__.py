"""Commands of the supervisor to the probe, and the probe's answers."""
