"""What the supervisor asks of the probe, and what the probe reports of itself."""
