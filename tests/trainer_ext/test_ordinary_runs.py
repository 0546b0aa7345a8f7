"""Whatever TRL completes, ours completes with the same losses: a matrix of TRL's own arguments and callbacks."""

import json
import os
from pathlib import Path

import pytest

from reflogp.store import Store, describe_reference
from reflogp.store.windows import TrainerSettings
from reflogp.trainer import MissingLogpsError
from tests.conftest import save_llama, write_rows
from tests.trainer_ext import distributed_run
from tests.trainer_ext.conftest import score_pairs
from tests.trainer_ext.ordinary_runs import (
    AXES,
    KEEP_END,
    NOT_OF_KTO,
    World,
    apart,
    combinations,
    is_possible,
    pairs_met,
    settings,
    short_rows,
)

SEED = 18
#: How many of the matrix are run; REFLOGP_ORDINARY_RUNS=42 runs all. The first ones are those in which most choices meet.
RUNS = int(os.environ.get("REFLOGP_ORDINARY_RUNS", "18"))
KTO_RUNS = max(4, RUNS // 8)
DPO = combinations(max(42, RUNS), SEED)
KTO = combinations(KTO_RUNS, SEED + 1, tuple(axis for axis in AXES if axis not in NOT_OF_KTO))
#: Of these every pair of processes makes some. Left out is what torch's DDP cannot do: compiled graphs of one process, and
#: reentrant checkpointing, which marks parameters ready twice; and what TRL cannot: precompute in memory, since each process
#: then looks for its columns in a temporary folder of its own.
NOT_TOGETHER = {"torch_compile", "gradient_checkpointing_kwargs", "precompute_ref_log_probs"}
TOGETHER = [
    choices
    for choices in combinations(24, SEED + 2)
    if not NOT_TOGETHER & {name for name, value in settings(choices).items() if value}
][:5]
#: What broke first: each alone, with everything else at its default.
ALONE = [
    {axis: (choice if axis == own else next(iter(AXES[axis]))) for axis in AXES}
    for own, choice in (
        ("evaluation", "on start"),
        ("evaluation", "in a callback"),
        ("begin", "train twice"),
        ("begin", "trained elsewhere"),
        ("callback", "all flags"),
        ("callback", "logs"),
    )
]
ALONE += [{**ALONE[0], "evaluation": "steps", "saving": "best"}]


def named(choices) -> str:
    """A combination by what is not the first choice of its axis."""
    return ", ".join(f"{axis}: {choice}" for axis, choice in choices.items() if choice != next(iter(AXES[axis])))


@pytest.fixture(scope="module")
def world(tokenizer, pair_rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ordinary")
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = save_llama(folder / "model", tokenizer, **size)
    rows = short_rows(pair_rows)
    data = write_rows(folder / "rows.jsonl", rows)
    score_pairs(model, data, folder / "store")
    score_pairs(model, data, folder / "store", settings=TrainerSettings(KEEP_END, "keep_end"))
    Store(folder / "kto-store").create_table(describe_reference(str(model), "float32"))
    return World(model, tokenizer, rows, folder / "store", folder)


def kto(world) -> World:
    return World(world.model, world.tokenizer, world.rows, world.folder / "kto-store", world.folder, kto=True)


def assert_equal(world, choices, name, record_property) -> None:
    trls = world.run(choices, cached=False, name=name)
    while True:
        try:
            ours = world.run(choices, cached=True, name=name)
            break
        except MissingLogpsError as missing:  # KTO's sequences depend on the batch
            assert world.kto, "every pair was scored"
            score_pairs(world.model, Path(missing.command.split()[3]), world.store)
    difference = apart(ours.losses, trls.losses)
    record_property("difference", difference)
    assert len(trls.losses) > 1
    assert difference <= 1e-5, (named(choices), ours.losses, trls.losses)
    assert ours.events == trls.events
    assert_audited(choices, ours.verdict, ours.findings)


def assert_audited(choices, verdict, findings) -> None:
    """A warning only about a log that is really missing: a callback forbade it, or logged or evaluated before it."""
    may_warn = choices["callback"] in ("quiet", "all flags") or choices["evaluation"] == "in a callback"
    assert set(findings) <= ({"schedule"} if may_warn else set()), (named(choices), findings)
    assert verdict == ("warned" if findings else "passed")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(RUNS))
def test_dpo(number, world, record_property):
    assert_equal(world, DPO[number], f"dpo-{number}", record_property)


@pytest.mark.slow
@pytest.mark.parametrize("choices", ALONE, ids=named)
def test_one_choice_alone(choices, world, record_property):
    assert_equal(world, choices, f"alone-{ALONE.index(choices)}", record_property)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(KTO_RUNS))
def test_kto(number, world, record_property):
    assert_equal(kto(world), KTO[number], f"kto-{number}", record_property)


def test_choices_meet():
    """The runs are different ones, that every choice is part of, and most pairs of choices."""
    assert all(map(is_possible, DPO))
    assert {(axis, choice) for choices in DPO for axis, choice in choices.items()} == {
        (axis, choice) for axis in AXES for choice in AXES[axis]
    }
    possible = pairs_met(combinations(400, SEED))
    assert pairs_met(DPO) > possible / 2


@pytest.mark.slow
def test_two_processes(world, tmp_path):
    """Each of two processes makes the same runs, with TRL's trainer and with ours."""
    given = {"model": str(world.model), "rows": world.rows, "store": str(world.store), "runs": TOGETHER}
    function = f"{__name__}:ranks"
    _, seen, _ = distributed_run.launch(given, tmp_path, function=function, timeout=400)
    assert len(seen) == 2
    for rank in seen:
        for choices, run in zip(TOGETHER, rank["runs"], strict=True):
            assert apart(run["ours"], run["trl"]) <= 1e-5, (named(choices), run)
            assert_audited(choices, run["verdict"], run["findings"])


def ranks(settings_file: str) -> None:
    """What each of two processes calls."""

    def work(given):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(given["model"])
        own = World(Path(given["model"]), tokenizer, given["rows"], Path(given["store"]), Path(given["out"]))
        found = []
        for number, choices in enumerate(given["runs"]):
            trls, ours = (own.run(choices, cached=cached, name=f"run-{number}") for cached in (False, True))
            found.append({"trl": trls.losses, "ours": ours.losses, "verdict": ours.verdict, "findings": ours.findings})
        return {"runs": found}

    distributed_run.run(work, settings_file)


def test_the_runs_can_be_told(capsys):
    """`REFLOGP_ORDINARY_RUNS=N pytest -rP` prints what each run is; here, that each can be written down."""
    assert json.loads(json.dumps(DPO)) == DPO
