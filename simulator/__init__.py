"""Engines without GPUs that behave as vLLM where a prefix-aware router can tell, and traffic for them."""
