"""vLLM as an engine: in a process of its own environment (local), or a `vllm serve` that runs somewhere (remote)."""
