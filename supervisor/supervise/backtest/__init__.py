"""Back-tests: decisions of a policy on recorded runs, and their scores."""
