"""The conformance kit: one suite per extension point, for the built-in plugins and for anybody's.

Needs pytest and hypothesis. Import a suite from its module and subclass it in your tests; `engine.testing.offer` shows
how. `engine plugins check NAME` runs the same suite without a line of test code.

| extension point | suite |
|---|---|
| attention backend | `engine.testing.attention.AttentionConformance` |
| KV cache | `engine.testing.kv_cache.KVCacheConformance` |
| KV connector | `engine.testing.kv_connector.KVConnectorConformance` |
| speculator | `engine.testing.speculator.SpeculatorConformance` |
| model | `engine.testing.model.ModelConformance` |
| model source | `engine.testing.model_source.ModelSourceConformance` |
| weight loader | `engine.testing.weight_loader.WeightLoaderConformance` |
| quantization | `engine.testing.quantization.QuantizationConformance` |
| executor | `engine.testing.executor.ExecutorConformance` |
| scheduling policy | `engine.testing.scheduling.SchedulingConformance` |
| observer | `engine.testing.observer.ObserverConformance` |
| CLI command | `engine.testing.cli_command.CLICommandConformance` |
| server route | `engine.testing.server_route.ServerRouteConformance` |
| grammar | `engine.testing.grammar.GrammarConformance` |
| reasoning parser | `engine.testing.reasoning_parser.ReasoningParserConformance` |
| tool parser | `engine.testing.tool_parser.ToolParserConformance` |
| rate limit | `engine.testing.rate_limit.RateLimitConformance` |

A component that wraps another is tested around an installed one: `engine.testing.wrapping`.

`engine.testing.suites.SUITES` is the same table for programs. Checks say which claim they prove with
`engine.testing.claims.proves`.
"""
