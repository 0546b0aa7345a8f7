"""Settings of a small training run on a CPU.

Imports nothing: environments that have another TRL and no pytest read it too.
"""

ON_CPU = {
    "learning_rate": 1e-4,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "bf16": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 7,
}
