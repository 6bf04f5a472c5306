"""Pages, and what draws their pictures."""
