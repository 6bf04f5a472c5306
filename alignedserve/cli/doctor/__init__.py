"""`alignedserve doctor`: whether a model would run here, and if not, or slowly, why. There is a file for each area.

A check calls the code that decides when a server starts; it has no rules of its own.
"""
