"""Listeners that patches and adapters call: one for each event of the job."""
