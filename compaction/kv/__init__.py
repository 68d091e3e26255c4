"""The KV cache: what it weighs (`geometry`, `measure`) and how it is kept.

Importing this package loads no torch.
"""
