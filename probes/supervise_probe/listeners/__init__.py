"""What patches and adapters speak to: each event of the job, on its way to who wants it."""
