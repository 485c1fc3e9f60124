"""The experts' rows summed up for each token."""
