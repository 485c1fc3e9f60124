"""Small kernels that measure one limit of a GPU: issue of copies, combines, launches."""
