"""/v1/completions beside what `vllm serve` answers: values of plain forwards in its format, for its own clients."""

import time
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from reflogp.scoring import EngineChoice, join, score
from reflogp.store import Store, sequence_keys
from tests.service.serving import float32, running, settings_file, wait_until
from tests.versions import skip_before

K = 6
PROMPTS = [[5, 9, 7, 30, 2], [5, 9, 7, 8], [11]]


@pytest.fixture(scope="module")
def service(place, reference_folder, warm_python):
    references = {"ref": {**float32(reference_folder), "top_k": K}, "plain": {**float32(reference_folder), "dtype": "bfloat16"}}
    with running("--config", settings_file(place, place / "store", references), warm=warm_python) as found:
        found.worker_ready()
        yield found


@pytest.fixture(scope="module")
def plain(reference_folder):
    """Log-probs of the whole vocabulary for each token of a prompt from the second on, float32."""
    model = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def forward(ids):
        return torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, :-1], 1)

    return forward


def ask(service, **body):
    return httpx.post(f"{service.url}/v1/completions", json={"model": "ref", "max_tokens": 1, **body}, timeout=60)


def hits_of(service, prompts, k) -> int:
    """How many of the prompts are read from the store now."""
    name = 'reflogp_sequences_total{how="hit",way="online"}'

    def count() -> float:
        text = httpx.get(f"{service.url}/metrics").text
        return float(text.split(name)[1].split()[0]) if name in text else 0.0

    before = count()
    ask(service, prompt=prompts, prompt_logprobs=k)
    return int(count() - before)


def require_right(found, ids, plain, k, tolerance) -> None:
    """`prompt_logprobs` as vLLM gives them: the prompt's own token, then the k most probable ones, with their ranks."""
    assert found[0] is None and len(found) == len(ids)
    for entries, token, row in zip(found[1:], ids[1:], plain(ids) if len(ids) > 1 else (), strict=True):
        best = torch.topk(row, k).indices.tolist()
        if k == 0:
            assert entries[str(token)]["rank"] is None
        else:
            assert sorted(entries, key=lambda top: entries[top]["rank"])[:k] == list(map(str, best))
        assert list(entries) == list(dict.fromkeys(map(str, (token, *best))))  # inspect_ai takes the first for the prompt's own
        for top, entry in entries.items():
            assert entry["logprob"] == pytest.approx(float(row[int(top)]), rel=tolerance, abs=1e-4)
            assert entry["decoded_token"] == f"token_id:{top}"


@pytest.mark.parametrize("k", [0, 1, K])
def test_prompt_logprobs(service, plain, k):
    prompts = [[*ids, 100 + k] for ids in PROMPTS[:2]] + [[11]]
    for tolerance in (0.0, 2**-10):  # the second time, stored values are read, which are float16
        if tolerance:
            wait_until(lambda: hits_of(service, prompts, k) == 2)
        answer = ask(service, prompt=prompts, prompt_logprobs=k, temperature=1.0).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2] and answer["usage"]["prompt_tokens"] == 12
        for choice, ids in zip(answer["choices"], prompts, strict=True):
            require_right(choice["prompt_logprobs"], ids, plain, k, tolerance)
            assert choice["logprobs"] is None and choice["text"] == ""


def test_echo_with_logprobs_as_lm_eval_reads_it(service, plain):
    """As parse_logprobs in lm_eval/models/openai_completions.py: sums of slices, and whether all tokens are the likeliest."""
    greedy = [5, 9]
    while len(greedy) < 6:
        greedy.append(int(plain([*greedy, 0])[-1].argmax()))
    prompts, context = [greedy, [*greedy[:5], 30]], 2
    for is_stored in (False, True):
        if is_stored:
            wait_until(lambda: hits_of(service, prompts, 1) == 2)
        answer = ask(service, prompt=prompts, echo=True, logprobs=1, temperature=0, seed=1234).json()
        for choice, ids, is_greedy in zip(answer["choices"], prompts, (True, False), strict=True):
            tokens, tops = (choice["logprobs"][name][context:-1] for name in ("token_logprobs", "top_logprobs"))
            right = plain(ids)[context - 1 :].gather(1, torch.tensor(ids[context:])[:, None])[:, 0]
            assert np.allclose(tokens, right, atol=1e-4)
            assert all(token == max(top.values()) for token, top in zip(tokens, tops, strict=True)) is is_greedy
            assert len(choice["logprobs"]["tokens"]) == len(ids) + 1


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"max_tokens": 5}, 422, "max_tokens 5: this service scores prompts"),
        ({"temperature": 0.7}, 422, "temperature 0.7: values are computed at temperature 1"),
        ({"prompt_logprobs": None, "logprobs": 1}, 422, "asks for no log-probs"),
        ({"prompt": "text"}, 422, "lists of token ids are needed"),
        ({"stream": True}, 422, "stream: Input should be False"),
        ({"n": 2}, 422, "n: Input should be 1"),
        ({"truncate_prompt_tokens": 1}, 422, "truncate_prompt_tokens: Input should be null"),
        ({"prompt": [[1, 2], [1, 10**6]]}, 422, "prompt 1 cannot be scored"),
        ({"prompt": []}, 422, "none of them empty"),
        ({"prompt": [[1, 2], []]}, 422, "none of them empty"),
        ({"prompt_logprobs": K + 1}, 422, f"is served with top_k = {K}"),
        ({"prompt": [1, 10**6]}, 422, "outside the model's vocabulary"),
        ({"prompt": [[7] * 1000] * 700, "prompt_logprobs": K}, 413, ""),
        ({"model": "plain"}, 422, "is served with top_k = 0"),
        ({"model": "other"}, 404, "other"),
        ({"model": None}, 404, "name one of ref, plain"),
    ],
)
def test_what_it_does_not_do_is_said(service, body, status, says):
    answer = ask(service, **{"prompt": [1, 2], "prompt_logprobs": 1, **body})
    assert answer.status_code == status and says in answer.json()["detail"] and answer.json()["next_step"]


def test_nothing_is_stored_for_sequences_without_values(service):
    bad = {"sequences": [{"prompt_ids": [1, 2], "completion_ids": [10**6]}]}
    answer = httpx.post(f"{service.url}/v1/score", params={"reference": "ref", "cache_write": True}, json=bad).json()
    assert answer["token_logps"] == [None]
    time.sleep(3)  # a commit comes 2 seconds later
    assert not any("could not store" in line for line in service.log)


def test_models_and_health(service):
    assert httpx.get(f"{service.url}/health").status_code == 200
    listed = httpx.get(f"{service.url}/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["ref", "plain"]
    assert listed["data"][0]["max_model_len"] > 0


def test_stored_and_new_prompts_in_one_request(service, plain, place):
    """And fewer tokens than are stored."""
    known, new = [50, 51, 52], [53, 54, 55, 56]
    ask(service, prompt=known, prompt_logprobs=K, max_tokens=0)
    wait_until(lambda: hits_of(service, known, K) == 1)
    [reference] = Store(place / "store").references()
    stored = Store(place / "store").top_table(reference, K).snapshot().find(sequence_keys([known[:1]], [known[1:]])).top(K)[0]
    assert stored[0].tolist() == torch.topk(plain(known), K).indices.tolist()
    answer = ask(service, prompt=[new, known], prompt_logprobs=2).json()
    for choice, ids in zip(answer["choices"], (new, known), strict=True):
        require_right(choice["prompt_logprobs"], ids, plain, 2, 2**-10)


def test_axolotls_payload_is_answered(service, plain):
    """As its collator for online distillation sends it: no max_tokens beside the sampling parameters."""
    body = {"model": "ref", "prompt": PROMPTS[:2], "prompt_logprobs": K, "max_new_tokens": 0, "logprobs": True, "echo": True}
    answer = httpx.post(f"{service.url}/v1/completions", json={**body, "sampling_params": {"max_tokens": 0}}, timeout=60)
    for choice, ids in zip(answer.json()["choices"], PROMPTS, strict=False):
        require_right(choice["prompt_logprobs"], ids, plain, K, 2**-10)


def test_the_remote_engine_scores_with_such_a_service(service, plain, reference_folder, tmp_path):
    """What a `vllm serve` is asked by `reflogp score --engine remote --top-k`, a service of reflogp answers too."""
    engine = EngineChoice("remote", url=service.url, served_model="ref", check_claim=True, device="cpu")
    rows = [{"prompt_ids": [60, 61], "completion_ids": [7, 30, 2]}, {"prompt_ids": [62], "completion_ids": [41, 42]}]
    done = score(str(reference_folder), rows, tmp_path / "store", dtype="float32", engine=engine, top_k=K)
    assert (done.scored, done.bad_rows) == (2, 0) and done.provenance["method"] == "completions"
    for row in join(str(reference_folder), rows, tmp_path / "store", top_k=K):
        right = plain([*row["prompt_ids"], *row["completion_ids"]])[len(row["prompt_ids"]) - 1 :]
        assert row["ref_top_ids"] == torch.topk(right, K).indices.tolist()
        assert np.allclose(row["ref_top_logps"], torch.topk(right, K).values, rtol=2**-10, atol=1e-4)


def live_teacher(plain):
    """What TRL's VLLMClient.get_sequence_logprobs returns, by plain forwards in the trainer's process."""

    def get_sequence_logprobs(sequences, prompt_lengths, top_logprobs, temperature):
        found = {name: [] for name in ("logprobs", "logprob_token_ids", "actual_logprobs", "actual_token_ids")}
        for ids, prompt in zip(sequences, prompt_lengths, strict=True):
            right = plain(ids)[prompt - 1 :]
            best, own = torch.topk(right, top_logprobs), torch.tensor(ids[prompt:])[:, None]
            for name, values in zip(found, (best.values, best.indices, right.gather(1, own), own), strict=True):
                found[name].append(values.tolist())
        return found

    return SimpleNamespace(get_sequence_logprobs=get_sequence_logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trls_trainer_with_a_teacher_server(
    dtype, service, plain, reference_folder, tokenizer, pair_rows, tmp_path, monkeypatch
):
    """ServerDistillationTrainer unchanged: its losses are those with a live teacher."""
    skip_before("trl", "1.11", "has a server of its own, which is not vLLM's")
    from datasets import Dataset
    from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer
    from trl.generation import vllm_client

    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *given, **named: True)

    def losses(live):
        student = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=dtype)
        with torch.no_grad():
            student.get_output_embeddings().weight.mul_(0.5)
        args = ServerDistillationConfig(
            output_dir=str(tmp_path),
            teacher_model_server_url=service.url,
            loss_top_k=K,
            beta=0.0,
            temperature=1.0,
            max_steps=2,
            max_completion_length=8,
            per_device_train_batch_size=2,
            use_cpu=True,
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        prompts = Dataset.from_list([{"prompt": row["prompt"]} for row in pair_rows[:4]])
        trainer = ServerDistillationTrainer(model=student, args=args, train_dataset=prompts, processing_class=tokenizer)
        if live:
            trainer.teacher_client = live_teacher(plain)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    served, live = losses(False), losses(True)
    assert len(served) == 2 and min(served) >= 1e-3
    assert np.allclose(served, live, rtol=2**-10, atol=1e-5)
