"""What keeps the probe harmless inside somebody else's process."""
