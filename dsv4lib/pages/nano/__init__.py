"""Run commands around the nano model. Train it, and measure what each precision costs it."""
