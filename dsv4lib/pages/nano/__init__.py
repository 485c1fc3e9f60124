"""Commands around the nano model: train it, and measure what each precision costs it."""
