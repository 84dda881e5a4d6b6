"""CPU kernels: numba functions over raw addresses, run on torch's own threads.

They know sizes, strides and formats, and nothing of models, rows or requests.
"""
