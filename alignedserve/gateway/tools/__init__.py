"""Tool calls: the tools of a request, how models write calls, and how calls are parsed from text."""
