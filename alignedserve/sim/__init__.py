"""The cluster in virtual time: the real deciding code, with simulated instances, links and clients around it."""
