"""What a policy would have done on runs that were recorded, and how good that was."""
