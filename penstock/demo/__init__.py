"""What ``penstock demo`` runs: its text and a training loop."""
