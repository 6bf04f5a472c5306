"""The whole system in virtual time, with everything that can go wrong going wrong, replayable from a seed."""
