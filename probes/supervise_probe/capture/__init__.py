"""The content of a savepoint: tensors, the variables of the job, and where its code stands."""
