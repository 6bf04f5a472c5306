"""What somebody who means harm may send to a server, and whether it holds."""
