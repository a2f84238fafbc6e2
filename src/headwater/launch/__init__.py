"""The composition root: the only package that chooses and builds implementations.

core        model, cache, scheduler and runner joined to an `EngineCore`
llm         an engine inside the caller's process
engine      the engine process, started by the supervisor
worker      an HTTP worker, started by the supervisor
supervisor  the process of `headwater serve`
router      the process of `headwater route`
"""
