"""Shards of the data: the origin of each batch, and those that are excluded."""
