"""The version of AlignedServe. It is apart from the package's other names, because processes send it."""

__version__ = "0.1.0"
