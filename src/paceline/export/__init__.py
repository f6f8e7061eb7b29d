"""Writes drafters in the folder formats that engines read.

Knows nothing about decoding.
"""
