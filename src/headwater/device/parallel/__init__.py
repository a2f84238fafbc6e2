"""Tensor parallel: one model split over the ranks of one engine, a process each.

Rank 0 is the engine. It decides, samples, and tells the other ranks what to compute; the others
decide nothing. Every rank has its own part of the weights and of the KV of every block.
"""
