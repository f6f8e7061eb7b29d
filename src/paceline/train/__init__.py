"""Training: corpus and features in, a drafter folder out.

Knows nothing about the engine, commands or measurements.
"""
