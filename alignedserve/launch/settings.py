"""All settings of `alignedserve serve`, checked once. Each part of the system that has settings has a section.

The flags of the command line are derived from the sections (`cli/options.py`). The plan and `doctor` read them. The
prefix of a section's flags, if there is one, stands beside the section.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from alignedserve import demo
from alignedserve.batch.config import BatchConfig
from alignedserve.engine.config import EngineConfig
from alignedserve.gateway.config import HttpConfig, KeyConfig
from alignedserve.gateway.limits.limits import CallLimits, SloConfig
from alignedserve.gateway.webhooks.config import WebhookConfig
from alignedserve.instance.config import NO_PROFILE
from alignedserve.kv.format import BlockFormat
from alignedserve.kv.groups import LayerGroups
from alignedserve.launch.config import LaunchConfig
from alignedserve.lengths.config import LengthConfig
from alignedserve.models.config import ModelConfig
from alignedserve.models.gguf.file_names import model_name
from alignedserve.process.logs import LogConfig
from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig

# Processes of a server have no terminal for progress bars.
NO_FLAGS = ("use_tqdm",)


@dataclass(frozen=True)
class Settings:
    engine: EngineConfig
    http: HttpConfig = field(default_factory=HttpConfig)
    keys: KeyConfig = field(default_factory=KeyConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    slo: Annotated[SloConfig, "slo_"] = field(default_factory=SloConfig)
    batches: Annotated[BatchConfig, "batch_"] = field(default_factory=BatchConfig)
    webhooks: Annotated[WebhookConfig, "webhook_"] = field(default_factory=WebhookConfig)
    lengths: Annotated[LengthConfig, "length_"] = field(default_factory=LengthConfig)
    log: Annotated[LogConfig, "log_"] = field(default_factory=LogConfig)
    limits: CallLimits = field(default_factory=CallLimits)
    router: RouterConfig = field(default_factory=RouterConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)

    def __post_init__(self) -> None:
        self.keys.check(self.http)
        for name, _ in self.engine.adapters:
            if name == self.served_name:
                raise ValueError(f"lora_modules: {name!r} is what the model itself is served as")

        self._check_max_loras()

    def _check_max_loras(self) -> None:
        max_loras, places = self.engine.max_loras, self.launch.lora_modules_from
        if places and not max_loras:
            raise ValueError(
                f"lora_modules_from={', '.join(places)}: needs max_loras, which reserves memory for adapters"
            )
        if max_loras and self.launch.address is not None:
            raise ValueError(
                f"max_loras={max_loras}: adapters are loaded while the server runs on one machine only"
            )

    @property
    def served_name(self) -> str:
        return self.http.served_model_name or model_name(self.engine.model)

    def block_format(self, model_config: ModelConfig, dtype: str) -> BlockFormat:
        # This imports numpy and tokenizers, which `serve --help` does not need.
        from alignedserve.engine.choices import block_format

        return block_format(self.engine, model_config, dtype, self.scheduling.share_blocks)

    def layer_groups(self, model_config: ModelConfig) -> LayerGroups:
        from alignedserve.engine.choices import choose_layer_groups

        return choose_layer_groups(self.engine, model_config, self.scheduling.share_blocks)

    def check_roles(self, roles: Mapping[str, int], found: str) -> None:
        """Raises ValueError for a feature that needs other instances. `found`: text of what there is."""
        is_colocated = "colocated" in roles
        self.scheduling.check_share_blocks(is_colocated, self.launch.pool_kv_dtype)
        if self.router.change_roles and (is_colocated or sum(roles.values()) < 3):
            raise ValueError(
                "change_roles: needs at least three prefill and decode instances, one of which can change; "
                f"{found}"
            )
        if self.router.change_roles and self.launch.cost_profile == NO_PROFILE:
            raise ValueError("change_roles: needs a cost_profile, which says how long prompts wait")
        if self.engine.hidden_cache and not is_colocated:
            raise ValueError(f"hidden_cache: needs colocated instances; {found}")


class Section(NamedTuple):
    name: str
    config_class: type[Any]
    prefix: str


def sections() -> Iterator[Section]:
    hints = get_type_hints(Settings, include_extras=True)
    for each in fields(Settings):
        hint = hints[each.name]
        config_class, prefix = get_args(hint) if get_origin(hint) is Annotated else (hint, "")
        yield Section(each.name, config_class, prefix)


def settings_of(model: str | None, options: Mapping[str, Any]) -> Settings:
    """Returns the settings. `options` are the flags' values by name. Raises ValueError for a value that is not
    allowed."""
    if model in (None, demo.NAME):
        options = {**options, "served_model_name": options.get("served_model_name") or demo.NAME}
    told = {each.name: taken(each.config_class, options, each.prefix) for each in sections()}
    told["engine"]["model"] = demo.directory_of(model)
    return Settings(**{each.name: each.config_class(**told[each.name]) for each in sections()})


def taken(config_class: type[Any], options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the options that are fields of the class, by the fields' names."""
    names = {each.name: f"{prefix}{each.name}" for each in fields(config_class)}
    return {name: options[flag] for name, flag in names.items() if flag in options}


def log_of(settings: Settings) -> LogConfig:
    """Returns the logging settings with an absolute directory, because other processes may run in other
    directories."""
    return replace(settings.log, dir=absolute_path(settings.log.dir))


def absolute_path(path: str | None) -> str | None:
    return path and os.path.abspath(os.path.expanduser(path))
