"""mHC: write-back of one site, coefficients, mixture and norm of the next, or the collapse before the head."""
