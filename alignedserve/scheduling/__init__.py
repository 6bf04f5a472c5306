"""What decides, and runs anywhere: policies, and what they see of the island and of instances. Pure."""
