"""Procedures without weights: warp, accept, commit, the loop and its slow reference.

Does not know any model or drafter.
"""
