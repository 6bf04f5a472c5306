"""The decisions, which run anywhere: policies, and what they see of the island and of instances. Pure."""
