"""The vLLM engine: a process in an environment of its own ("vllm"), or a running `vllm serve` ("remote")."""
