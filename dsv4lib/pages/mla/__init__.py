"""What the notebook of multi-head latent attention calls."""
