"""The conformance kit: one suite per extension point, for the built-in plugins and for anybody's.

Needs pytest and hypothesis. Import the suite from its module, such as `engine.testing.kv_cache.KVCacheConformance`, and
subclass it in your tests; `engine.testing.offer` shows how.
"""
