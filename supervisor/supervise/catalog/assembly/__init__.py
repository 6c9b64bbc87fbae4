"""Forms to one frozen policy: packs merged, names bound, defaults filled, the whole linted."""
