"""What a policy can name: detectors, actions, notifiers, metrics, faults, shipped files."""
