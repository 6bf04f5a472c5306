"""Services of a process: logs, private files, child processes, sockets, and preparation that prevents pauses."""

# A process that is down for HANG_S seconds and has not ended hangs. Ray reports an end within two seconds.
HANG_S = 10.0
