"""Carry out commands of `lab/cli.py`: run and conclude, doctor, JupyterLab, benches."""
