"""What the command line shows of checkpoints."""
