"""Where a request goes: an OpenAI-compatible relay that picks the replica whose KV cache is already warm."""
