"""What the notebook of `template_op` calls."""
