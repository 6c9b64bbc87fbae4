"""Which shard a batch comes from, and which shards the job leaves out."""
