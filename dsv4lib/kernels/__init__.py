"""CuTeDSL kernels, one package an op and one module an architecture (`<op>/sm100.py`), and how they are compiled.

A kernel module imports the CuTe DSL; this package, `compile` and `cubin` do not, so they can be imported anywhere.
"""
