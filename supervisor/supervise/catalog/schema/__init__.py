"""From type hints to kinds of values, which read YAML, write it and describe themselves."""
