"""The implementations of the recurrence, one file each, and the contract that they all fill."""
