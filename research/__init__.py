"""What papers claim, and the training of the demo model: nothing that the product imports."""
