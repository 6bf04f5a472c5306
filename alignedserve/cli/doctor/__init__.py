"""`alignedserve doctor`: whether it will run here, and if not, or slowly, why. A file for each area.

A check asks the code that decides when a server starts; it has no rules of its own.
"""
