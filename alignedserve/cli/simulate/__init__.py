"""`alignedserve simulate`: runs traffic through simulated islands with several settings, and compares the results. The
simulator is `alignedserve/sim`."""
