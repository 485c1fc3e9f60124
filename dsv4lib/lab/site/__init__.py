"""Publish notebooks and documents as one static site. It opens from file:// and asks no other machine for anything."""
