"""Builds a ModelConfig from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignedserve.models.config import ModelConfig
from alignedserve.models.fields import Fields, read_json_object
from alignedserve.models.hf_families import FAMILIES, Family
from alignedserve.models.hf_quantised import read_quantised


def load_model_config(directory: Path) -> ModelConfig:
    """Raises ValueError if config.json is missing, malformed, or describes an unsupported model."""
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} holds no config.json; a model directory must have one")
    generation_path = directory / "generation_config.json"
    generation = read_json_object(generation_path) if generation_path.is_file() else {}
    return model_config_from_dict(read_json_object(path), generation, where=str(path))


def model_config_from_dict(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelConfig:
    """Returns the configuration. `where` names the source in error messages. The end tokens of both files are
    merged."""
    fields = Fields(config, where)
    model = _family(fields)(fields)
    quantised = model["quantised"] = read_quantised(fields)
    is_gpt_oss = model["architecture"] == "gpt_oss"
    if quantised and quantised.method != "gguf" and (quantised.method == "mxfp4") != is_gpt_oss:
        raise ValueError(
            f"{where}: quant_method is {quantised.method!r}; must be "
            + ("mxfp4 for gpt_oss" if is_gpt_oss else f"another for {model['architecture']}")
        )
    generation = Fields(generation_config or {}, f"generation_config.json beside {where}")
    eos_token_ids = dict.fromkeys(model["eos_token_ids"] + generation.token_ids("eos_token_id"))
    return ModelConfig(**{**model, "eos_token_ids": tuple(eos_token_ids)})


def _family(fields: Fields) -> Family:
    names = fields.get("architectures")
    if not names:
        # Files written by hand often have only the model type.
        by_model_type = {name.removesuffix("ForCausalLM").lower(): name for name in FAMILIES}
        by_model_type |= {"gemma3text": "Gemma3ForCausalLM", "gemma3": "Gemma3ForConditionalGeneration"}
        model_type = str(fields.get("model_type"))
        names = [by_model_type.get(model_type.replace("_", ""), model_type)]
    known = [name for name in names if str(name) in FAMILIES] if isinstance(names, list) else []
    if not known:
        raise ValueError(
            f"{fields.where}: architectures is {names!r}, which is not supported; "
            "must be one of " + ", ".join(FAMILIES)
        )
    return FAMILIES[known[0]]
