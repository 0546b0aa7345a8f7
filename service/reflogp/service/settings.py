"""Read a service's settings from flags, environment variables and a TOML file, in this order of precedence.

Example of a settings file, with the corresponding environment variables:

    # serve.toml                            # environment: REFLOGP_STORE, REFLOGP_PORT, REFLOGP_REFERENCES='{"sft": {…}}', …
    store = "s3://team/logps"
    [references.sft]
    model = "/models/sft"
    dtype = "bfloat16"
    [[tokens]]
    name = "trainers"
    sha256 = "…"                            # digest of the token; `reflogp token trainers --config serve.toml` writes these
    scopes = ["score"]

A number that hardly any operator would change is no setting, but a constant beside its use.
"""

from __future__ import annotations

import hashlib
import os
import re
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from reflogp.scoring.engines import EngineChoice, EngineName
from reflogp.scoring.vllm_engine.options import check_options
from reflogp.store import Reference, UsageError, describe_reference, resolve_model
from reflogp.store.storage import PLACES, normalize_uri

#: What a token permits. read: all requests that only read. jobs: also submit, cancel and retry jobs, and send and delete
#: uploads. online: also score sequences online. score: both. admin: everything.
Scope = Literal["read", "jobs", "online", "score", "admin"]
SCOPES: tuple[str, ...] = get_args(Scope)


#: Environment variables of other parts of reflogp.
_OTHER_VARIABLES = {"REFLOGP_CACHE_DIR", "REFLOGP_TOKEN", "REFLOGP_VLLM_LOG", "REFLOGP_VLLM_PYTHON"}

_OF_REMOTE = ("url", "served_model", "concurrency", "check_claim")


class ReferenceSettings(BaseModel):
    """Settings of a reference model that the service offers under a name."""

    model_config = ConfigDict(extra="forbid")
    model: str = Field(
        description="A model folder (with config.json and safetensors files), the folder of a PEFT adapter, or a hub id."
    )
    dtype: str = Field(
        "auto",
        description="Compute dtype: `bfloat16`, `float32` or `float16`; `bfloat16-autocast` or `float16-autocast` (float32 "
        "weights under torch.autocast); `checkpoint` (the dtype in config.json); or `auto`, as in `reflogp score`: the dtype "
        "of the model's values in the store or, if there are none, `bfloat16`, or `float32` without a GPU. A service then "
        "reads the store when it starts; set a dtype for a service that others depend on. It is part of the reference id.",
    )
    lm_head_dtype: str | None = Field(
        None,
        description="Dtype of the logits: `float32`, or the same as `dtype` (the default). It is part of the reference id.",
    )
    revision: str | None = Field(None, description="Revision of the model on the Hub.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model or its tokenizer.")
    engine: EngineName = Field(
        "torch", description="Engine that computes log-probs: `torch`, `vllm` or `remote` (a running `vllm serve`)."
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="vllm: number of GPUs to shard each layer over. One engine uses this number of GPUs times the "
        "`pipeline_parallel_size` in vllm_options, which is 1 by default.",
    )
    vllm_options: dict[str, Any] = Field(
        default_factory=dict, description="vllm: additional arguments for vLLM (docs/engines.md)."
    )
    url: str | None = Field(
        None, pattern="^https?://", description="remote: URL of the server; its API key is read from VLLM_API_KEY."
    )
    served_model: str | None = Field(
        None, description="remote: name of the model on the server. Default: the server's model, if it has only one."
    )
    concurrency: int = Field(64, ge=1, description="remote: maximum number of concurrent requests to the server.")
    check_claim: bool = Field(
        True,
        description="remote: before storing any values, score a few sequences both locally and on the server, and compare the "
        "values. If they differ too much, nothing is stored, and the job or request fails.",
    )
    top_k: int = Field(
        0, ge=0, le=256, description="Number of most probable tokens to store with each value, for distillation."
    )

    @model_validator(mode="after")
    def _options_fit_the_engine(self) -> ReferenceSettings:
        owners = {"vllm": ("tensor_parallel", "vllm_options"), "remote": _OF_REMOTE}
        for owner, names in owners.items():
            given = sorted(self.model_fields_set.intersection(names))
            if given and self.engine != owner:
                raise ValueError(
                    f"{given[0]} is a setting of engine {owner}, but this reference's engine is {self.engine}: "
                    f'remove {given[0]}, or set engine = "{owner}"'
                )
        if self.engine == "remote" and self.url is None:
            raise ValueError("engine remote requires a url")
        try:
            check_options(self.vllm_options)
            EngineChoice(self.engine).require_dtype(self.dtype)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return self

    def folder(self) -> str:
        return str(resolve_model(self.model, self.revision))

    def reference(self) -> Reference:
        return describe_reference(self.model, self.dtype, lm_head_dtype=self.lm_head_dtype, revision=self.revision)

    def choice(self, **more: Any) -> EngineChoice:
        """Return the engine with these settings; `more` are fields of EngineChoice that they do not have."""
        of_the_model = {"model", "dtype", "lm_head_dtype", "revision", "engine"}
        return EngineChoice(self.engine, **self.model_dump(exclude=of_the_model), **more)


class TokenSettings(BaseModel):
    """A bearer token. The settings contain only the token's digest, not the token itself."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(description="Name of the token's user, shown in logs and as the submitter of jobs.")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="sha256 digest of the token.")
    scopes: set[Scope] = Field(description="The token's scopes: any of `read`, `jobs`, `online`, `score` and `admin`.")


class ServerSettings(BaseSettings):
    """Settings of a service. Unknown settings are rejected."""

    model_config = SettingsConfigDict(env_prefix="REFLOGP_", extra="forbid")

    store: str = Field(description=f"URI of the store: {PLACES}.")
    references: dict[str, ReferenceSettings] = Field(default_factory=dict, description="Reference models by name.")
    tokens: list[TokenSettings] = Field(
        default_factory=list, description="Callers' bearer tokens. Required unless the service listens only on loopback."
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8311, ge=0, le=65535, description="Port to listen on; 0 chooses a free port.")
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="Host names that clients may use to reach the service, such as `data.example.org` or `*.example.org`. "
        "Loopback names are always allowed. If `tokens` is set, IP addresses are always allowed too, and all names are allowed "
        "by default.",
    )
    state: Path | None = Field(
        None,
        description="State folder for jobs, uploads and results. Default: a folder for this store in ~/.local/state/reflogp.",
    )
    keep_days: float = Field(30.0, gt=0, description="Number of days to keep ended jobs and their results.")
    log_format: Literal["text", "json"] = Field("text", description="Format of the log; json writes one JSON object per line.")
    # workers
    devices: list[str] = Field(
        ["all"],
        min_length=1,
        description="Devices to use, each with one worker process: `all` (every GPU, or the CPU if there is no GPU), `auto` "
        "(one device, which the engine chooses), `cpu`, `cuda:0`, … With tensor_parallel = N, there is one worker for every N "
        "GPUs. If all references have the engine `remote`, `all` means `auto`. Workers without a job of their own help with a "
        "running job.",
    )
    token_budget: int | Literal["auto"] = Field(
        "auto", description="Maximum number of tokens in one forward pass; auto chooses a number based on free memory."
    )
    max_loaded: int = Field(
        1,
        ge=1,
        description="Maximum number of models that a worker keeps in memory. Even if it is 1, a worker keeps a pinned "
        "model and one other.",
    )
    pinned: str | None = Field(
        None, description="Name of a reference whose model every worker loads at startup and never unloads."
    )
    max_worker_bytes: int | None = Field(
        None,
        gt=0,
        description="Maximum memory of a worker and its child processes, and of the process of a job, in bytes. A process "
        "that uses more is killed; its work continues in another one. Default: 9/10 of the memory of the machine or container.",
    )
    # queues
    max_queued_tokens: int = Field(
        16 << 20, gt=0, description="Maximum number of tokens queued for a worker; further requests are rejected with 429."
    )
    # datasets
    dataset_roots: list[Path] = Field(
        default_factory=list, description="Folders with datasets. Jobs may name any file or subfolder in them. Default: none."
    )
    dataset_uris: list[str] = Field(
        default_factory=list,
        description="Prefixes of the URIs by which jobs may name datasets, such as s3://bucket/folder/, gs://bucket/, "
        "az://container/ or hf://datasets/organisation/name. Default: none.",
    )
    max_upload_bytes: int = Field(8 << 30, gt=0, description="Maximum size in bytes of one upload or fetched dataset.")
    max_uploads_bytes: int = Field(
        64 << 30,
        gt=0,
        description="Maximum total size in bytes of all uploads and fetched datasets. The token ids of datasets, which are "
        "kept so that no dataset is tokenized twice, take up to a third of this size in addition.",
    )

    @model_validator(mode="after")
    def _open_only_on_loopback(self) -> ServerSettings:
        if not self.tokens and not self.on_loopback():
            raise ValueError(f"host {self.host} is reachable from other machines: set tokens, or listen on 127.0.0.1")
        return self

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_are_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if name == "*":
                raise ValueError("'*' would allow requests from pages on any site; list the service's host names instead")
            if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_.:-]+", name) or re.search(r"^[^:]+:\d+$", name):
                raise ValueError(f"{name!r} is not a host name; write the name without a scheme, port or path")
        return names

    @model_validator(mode="after")
    def _pinned_is_known(self) -> ServerSettings:
        if self.pinned is not None and self.pinned not in self.references:
            raise ValueError(f"pinned is {self.pinned!r}, but the settings contain no reference with this name")
        return self

    def state_folder(self) -> Path:
        """Return the folder for jobs, uploads and results: `state` if set, otherwise a default folder for this store.

        The default is `reflogp/<digest of the store's URI>` below $XDG_STATE_HOME or ~/.local/state.
        """
        if self.state is not None:
            return self.state
        home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        name = hashlib.blake2b(normalize_uri(self.store).encode(), digest_size=8).hexdigest()
        return home / "reflogp" / name

    def on_loopback(self) -> bool:
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *sources: PydanticBaseSettingsSource, **named: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = cls.model_config.get("toml_file")
        toml = (TomlConfigSettingsSource(settings_cls, file),) if file else ()
        return (named["init_settings"], named["env_settings"], *toml)


def unknown_variables() -> list[str]:
    """Return the names of environment variables that look like settings, but are none (any more), and are ignored."""
    known = {f"REFLOGP_{name.upper()}" for name in ServerSettings.model_fields} | _OTHER_VARIABLES
    return sorted(name for name in os.environ if name.startswith("REFLOGP_") and name not in known)


def _said(error: ErrorDetails) -> str:
    name = ".".join(map(str, error["loc"])) or "settings"
    if error["type"] == "extra_forbidden":
        return f"{name}: unknown setting"
    if error["type"] == "missing":
        return f"{name} is not set" + (": pass --store, or set `store` in the settings file" if name == "store" else "")
    return f"{name}: {error['msg'].removeprefix('Value error, ')}"


def read_settings(file: str | None = None, **flags: Any) -> ServerSettings:
    """Read the settings from flags, the environment and the TOML file `file`, if any. Flags that are None are ignored.

    Raise UsageError if the file does not exist or cannot be parsed, or if settings are invalid. The message says what is wrong
    with up to three of the invalid settings.
    """
    if file is not None and not Path(file).is_file():
        raise UsageError(f"settings file {file} does not exist")

    class FromFile(ServerSettings):
        model_config = SettingsConfigDict(toml_file=file)

    try:
        return FromFile(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        raise UsageError("; ".join(_said(entry) for entry in error.errors()[:3])) from error
    except ValueError as error:  # the TOML file, or JSON in an environment variable, cannot be parsed
        raise UsageError(f"settings {file or 'from the environment'}: {str(error).splitlines()[0]}") from error
