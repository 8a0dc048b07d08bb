"""Prometheus metrics: speculation counts and load, under vLLM's names where the meaning is equal."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .engine.client import EngineClient


class EngineCollector(Collector):
    """
    A collector that reads the engine's state at every scrape.

    Args:
        engine (`EngineClient`): the engine.
        model_name (`str`): value of the label `model_name`, which vLLM's metrics have as well.
    """

    def __init__(self, engine: EngineClient, model_name: str):
        self.engine, self.model_name = engine, model_name

    def collect(self) -> Iterator[Metric]:
        state = self.engine.state
        speculation, used = state.speculation, state.num_blocks - state.num_free_blocks
        yield self._counter("vllm:spec_decode_num_drafts", "Drafts.", speculation.num_drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens.", speculation.num_draft_tokens)
        yield self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", speculation.num_accepted_tokens
        )
        per_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts whose accepted path reaches a depth; position 0 is the first draft token.",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(list(speculation.num_accepted_per_position)):
            per_position.add_metric([self.model_name, str(position)], count)
        yield per_position
        yield self._counter("vllm:prompt_tokens", "Prompt tokens read.", state.num_prompt_tokens)
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", state.num_prefix_queries
        )
        yield self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", state.num_prefix_hits
        )
        yield self._counter("vllm:generation_tokens", "Tokens generated.", state.num_generation_tokens)
        yield self._counter("vllm:num_preemptions", "Requests that lost their K/V to others.", state.num_preemptions)
        yield self._gauge("vllm:num_requests_running", "Requests in the batch.", state.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for their turn.", state.num_waiting)
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of the K/V blocks in use; 1 is all.", used / state.num_blocks
        )
        yield self._gauge(
            "hf_specdec:speculation_enabled", "1 if the load lets requests speculate, else 0.", int(state.speculates)
        )
        yield self._gauge("hf_specdec:num_graphs_left", "CUDA graphs to capture in spare time.", state.num_graphs_left)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self.model_name], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self.model_name], value)
        return family


def registry_of(engine: EngineClient, model_name: str) -> CollectorRegistry:
    """A Prometheus registry with the metrics of one engine."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, model_name))
    return registry
