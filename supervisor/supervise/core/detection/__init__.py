"""A rank's detectors, how they are fed, and what each rule reads."""
