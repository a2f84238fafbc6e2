"""Plug-ins that vLLM loads: a secondary tier, an eviction policy, a KV connector."""
