"""The islands: their routers, which of them a request goes to, and the requests that are open there."""
