"""Tool calls: the tools of a client, how chat templates write calls, and how calls are parsed from text."""
