"""Orders to the ranks of a job: on their way, behind a fence, and as long as a lease lasts."""
