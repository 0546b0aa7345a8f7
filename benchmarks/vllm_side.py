"""Run vLLM in its own environment: read lists of token ids, one JSON line per run, and print the seconds that vLLM took."""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # vLLM's engine process fails to start on machines with few cores
# In GiB. By default vLLM takes most of the machine's memory, which other processes use too.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

from vllm import LLM, SamplingParams, TokensPrompt  # vLLM reads the environment when it is imported


def main() -> None:
    weights = "dummy" if "--random-weights" in sys.argv else "auto"
    k = int(sys.argv[sys.argv.index("--prompt-logprobs") + 1])
    llm = LLM(
        model=sys.argv[1],
        dtype="bfloat16",
        max_model_len=8192,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        load_format=weights,
        max_logprobs=max(20, k),
    )
    settings = SamplingParams(max_tokens=1, prompt_logprobs=k, flat_logprobs=bool(k), detokenize=False)
    print('{"reflogp": "ready"}', flush=True)
    for line in sys.stdin:
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in json.loads(line)]
        start = time.perf_counter()
        llm.generate(prompts, settings, use_tqdm=False)
        print(json.dumps({"reflogp": "done", "seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
