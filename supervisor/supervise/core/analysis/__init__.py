"""Computations from numbers alone: bands, spikes, significance, attribution to shards."""
