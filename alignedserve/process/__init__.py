"""What a process is to its machine: its logs, its private files, a process that works for it, no pauses."""
