"""What a service is told: by flags, by environment variables, by a TOML file, in that order of precedence.

Knows names, defaults and bounds. Called by `reflogp serve` and by tests.

    # serve.toml                            # environment: REFLOGP_STORE, REFLOGP_PORT, REFLOGP_REFERENCES='{"sft": {…}}', …
    store = "s3://team/logps"
    [references.sft]
    model = "/models/sft"
    dtype = "bfloat16"
    [[tokens]]
    name = "trainers"
    sha256 = "…"                            # of the token; `reflogp token trainers` makes one
    scopes = ["read", "score"]
"""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from reflogp_store.errors import UsageError

#: read: look up and look at; score: compute; admin: everything.
Scope = Literal["read", "score", "admin"]
SCOPES: tuple[str, ...] = get_args(Scope)


class ReferenceSettings(BaseModel):
    """A reference model by a name of the service's own."""

    model_config = ConfigDict(extra="forbid")
    model: str = Field(description="Folder with config.json and safetensors, a PEFT adapter's folder, or a hub id.")
    dtype: str = Field("bfloat16", description="Compute dtype; part of the reference id.")
    lm_head_dtype: str | None = Field(None, description="float32 computes the logits in float32; part of the reference id.")
    revision: str | None = Field(None, description="Revision of a hub id.")


class TokenSettings(BaseModel):
    """A bearer token, by its digest: the token itself is nowhere stored."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(description="Who it is for; appears in logs.")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="Digest of the token.")
    scopes: set[Scope] = Field(description="What it may do.")


class ServerSettings(BaseSettings):
    """Settings of one service. Unknown names are refused."""

    model_config = SettingsConfigDict(env_prefix="REFLOGP_", extra="forbid")

    store: str = Field(description="Store: a folder, or s3://, gs://, az://.")
    references: dict[str, ReferenceSettings] = Field(default_factory=dict, description="Reference models by name.")
    tokens: list[TokenSettings] = Field(default_factory=list, description="Who may call. None is allowed on loopback only.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8311, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    max_body_bytes: int = Field(256 << 20, gt=0, description="A longer request body is refused.")
    max_lookup_keys: int = Field(5_000_000, gt=0, description="Keys of one lookup.")
    max_answer_bytes: int = Field(1 << 30, gt=0, description="A lookup whose token values are longer is refused.")
    max_connections: int = Field(1_000, gt=0, description="Connections beyond are answered 503.")

    @model_validator(mode="after")
    def _open_only_on_loopback(self) -> ServerSettings:
        if not self.tokens and not self.on_loopback():
            raise ValueError(f"host {self.host} is reachable by others: give tokens, or listen on 127.0.0.1")
        return self

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


def read_settings(file: str | None = None, **flags: Any) -> ServerSettings:
    """Settings from flags (None means not given), the environment and a TOML file.

    Raises UsageError that names the setting and what is wrong with it.
    """
    if file is not None and not Path(file).is_file():
        raise UsageError(f"settings file {file} is not there")

    class FromFile(ServerSettings):
        model_config = SettingsConfigDict(toml_file=file)

    try:
        return FromFile(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "settings"
        raise UsageError(f"{name}: {first['msg']} ({error.error_count()} in all)") from error
    except ValueError as error:  # TOML or JSON that cannot be parsed
        raise UsageError(f"settings {file or 'from the environment'}: {str(error).splitlines()[0]}") from error
