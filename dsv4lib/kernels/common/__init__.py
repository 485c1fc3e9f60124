"""What several kernels share: layouts and, later, pipelines, TMEM plans and schedulers."""
