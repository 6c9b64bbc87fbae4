"""The process tree: start it with the probe on its path, pass signals on, stop it, reap it."""
