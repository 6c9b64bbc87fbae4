"""What is computed from numbers alone: bands, spikes, significance, attribution to shards."""
