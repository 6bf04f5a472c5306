"""Services of a process: logs, private files, child processes, sockets, and preparation that prevents pauses."""
