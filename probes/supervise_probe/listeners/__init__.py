"""What patches and adapters call: each event of the job, on its way to who wants it."""
