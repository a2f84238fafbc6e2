"""Headwater's tiers and policies inside other engines: vLLM, SGLang, Dynamo. See docs/plugins.md.

A plug-in is loaded by the other engine. It does not install torch: it uses that of the engine.
"""
