"""The composition root: the only package that chooses and builds implementations.

core      model, cache, scheduler and runner joined to an `EngineCore`
llm       an engine inside the caller's process
engine    the engine process: `python -m headwater.launch.engine ADDRESS`
server    the HTTP process, with an engine process behind it
"""
