"""`alignedserve serve`, which decides in seconds how many islands there should be."""

from __future__ import annotations

from alignedserve.cli.main import main
from alignedserve.launch import growth

if __name__ == "__main__":
    growth.SHORT_S, growth.CALM_S = 2.0, 6.0
    # However busy they are: how fast this machine is decides nothing.
    growth.MOST_BUSY = 2.0
    main()
