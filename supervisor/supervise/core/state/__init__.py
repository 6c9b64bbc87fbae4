"""All that the engine remembers: the run, its incidents, what was done and can be undone."""
