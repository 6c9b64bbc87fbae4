"""The files that people write, as dataclasses whose fields are the keys."""
