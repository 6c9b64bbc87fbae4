"""What a savepoint holds: tensors, the variables of the job, and where its code stands."""
