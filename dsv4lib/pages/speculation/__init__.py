"""What the notebook of drafts and their verification calls."""
