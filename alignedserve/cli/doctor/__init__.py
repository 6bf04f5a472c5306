"""`alignedserve doctor`: checks whether a model will run here, and explains problems and slow paths.

There is a file for each area. A check calls the code that `serve` runs at its start, and has no rules of its own.
"""
