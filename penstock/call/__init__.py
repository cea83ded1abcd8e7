"""The frame: from the declaration of an operator to validation, the choice of an implementation, torch's operators and the fast path."""
