"""Drafters: one file per architecture, with its config, module and folder format.

Knows nothing of decoding, training or serving.
"""
