"""Quantised weights: the published formats, and their forms in memory."""
