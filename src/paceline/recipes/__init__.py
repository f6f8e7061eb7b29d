"""Recipes: functions that return the full frozen config of a training run.

Knows nothing about how training works.
"""
