"""Tests with a real vLLM in its own environment: `make test-vllm`."""
