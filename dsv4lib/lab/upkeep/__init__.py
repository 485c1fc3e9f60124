"""Keep the workspace as its rules say: lint, words to replace, a new op or stage to start from, mutants."""
