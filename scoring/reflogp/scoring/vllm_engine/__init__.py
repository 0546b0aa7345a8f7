"""Score with vLLM: in a process with its own environment (engine "vllm") or on a running `vllm serve` (engine "remote")."""
