"""Measures and checks: metrics, verify, the demo's comparison.

Knows nothing about training.
"""
