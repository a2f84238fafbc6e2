"""Quantised weights: the formats that models are published in, and what they become in memory."""
