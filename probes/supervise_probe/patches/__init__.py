"""The functions of torch that the probe replaces, and with what."""
