"""Looks at this host before a job is started on it again: memory, disk, devices, arithmetic."""
