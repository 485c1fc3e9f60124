"""What the command line shows of a model that continues a text."""
