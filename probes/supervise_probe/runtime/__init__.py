"""Protection of the job's process from the probe."""
