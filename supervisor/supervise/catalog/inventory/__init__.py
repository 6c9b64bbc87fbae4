"""Names that a policy can use: detectors, actions, notifiers, metrics, faults, shipped files."""
