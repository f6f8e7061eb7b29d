"""Prompts and conversations in, rows out.

Knows nothing about models.
"""
