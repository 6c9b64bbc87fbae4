"""Run scenarios through the live engine: their results, their assertions, their coverage."""
