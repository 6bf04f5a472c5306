"""Starts the processes of a system, watches them, and stops them: `alignedserve serve`."""
