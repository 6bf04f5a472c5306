"""The papers' claims: verdicts, made data, figures, and the way from a run to the page."""
