"""Headwater's tiers and policies inside other engines: vLLM, SGLang, Dynamo. See docs/plugins.md.

A plug-in is loaded by the other engine. It imports no torch of its own: the engine supplies it.
"""
