"""Why a rule did not fire or act at a step, and what another policy would do differently."""
