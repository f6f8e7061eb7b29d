"""Training of drafters: corpus, cached features, blocks, losses and the loop.

Does not know decoding, serving or commands.
"""
