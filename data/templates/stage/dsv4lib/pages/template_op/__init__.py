"""What the notebook of stage `template_op` calls."""
