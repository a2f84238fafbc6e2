"""Prefill here, decode there: two instances, one sequence, exactly one outcome."""
