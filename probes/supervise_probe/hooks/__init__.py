"""Functions of torch and of training libraries that the probe observes, with its listeners."""
