"""YAML text as a tree that remembers places, and back; what is wrong with a file, and where."""
