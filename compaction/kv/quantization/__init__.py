"""Quantized storage of keys and values: codecs, packing, and the cache layer that holds what they make.

`settings` says how (no torch), `codecs` turns rows of numbers into codes and back, `layer` keeps them.
"""
