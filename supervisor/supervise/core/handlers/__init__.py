"""What the engine does about each kind of event; one file per kind."""
