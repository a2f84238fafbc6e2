"""Prefill/decode disaggregation: one instance computes a prompt, another one decodes it."""
