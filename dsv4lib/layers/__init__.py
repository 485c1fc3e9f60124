"""Modules of the model, assembled from ops."""
