"""The settings to check, and what the launcher and the instances derive from them on this machine."""

from __future__ import annotations

from functools import cached_property

import torch

from alignedserve.cli.doctor.finding import NotChecked
from alignedserve.cli.doctor.gpu_facts import GpuFacts, gpu_facts
from alignedserve.engine.build import TORCH_DTYPES
from alignedserve.engine.choices import choose_dtype, choose_max_model_len
from alignedserve.instance.config import InstanceConfig
from alignedserve.kv.format import BlockFormat
from alignedserve.launch.nodes import threads_of_each
from alignedserve.launch.plan import (
    IslandPlan,
    Node,
    check,
    free_shm_bytes,
    plan_island,
    runs_on_cpu,
)
from alignedserve.launch.settings import Settings
from alignedserve.models.locate import Location, locate_model
from alignedserve.protocol.address import RouterAddress


class Case:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine = settings.engine

    @property
    def roles(self) -> dict[str, int]:
        """The number of instances of each role."""
        num_gpus = 0 if self.engine.device == "cpu" else len(self.gpus.gpus)
        return self.settings.launch.instances(num_gpus // self.engine.tensor_parallel_size)

    @property
    def num_instances(self) -> int:
        return sum(self.roles.values())

    @property
    def num_threads(self) -> int:
        return threads_of_each(self.settings.launch)

    @cached_property
    def gpus(self) -> GpuFacts:
        return gpu_facts()

    @property
    def is_cpu(self) -> bool:
        if self.engine.device == "cuda" and not self.gpus.gpus:
            raise NotChecked("a GPU")
        return runs_on_cpu(self.engine, len(self.gpus.gpus))

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.is_cpu else "cuda")

    @cached_property
    def located(self) -> Location | ValueError:
        """The model's files, or the error that there are none. Nothing is downloaded."""
        try:
            return locate_model(
                self.engine.model, self.engine.load_format, self.engine.revision, may_download=False
            )
        except ValueError as error:
            return error

    @property
    def model(self) -> Location:
        if isinstance(self.located, ValueError):
            raise NotChecked("the model")
        return self.located

    @property
    def dtype(self) -> str:
        return choose_dtype(self.engine, self.model.config, self.is_cpu)

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    @property
    def form(self) -> BlockFormat:
        return self.settings.block_format(self.model.config, self.dtype)

    @property
    def max_model_len(self) -> int:
        """The maximum tokens of a request. Raises ValueError."""
        return choose_max_model_len(self.engine, self.model.config)

    @cached_property
    def island(self) -> IslandPlan:
        """The plan of the island. Raises ValueError if the settings do not fit this machine."""
        check(self.settings, self.model)
        # No process will connect to this router.
        address = RouterAddress.unix("", "")
        num_gpus = 0 if self.is_cpu else len(self.gpus.gpus)
        node = Node("localhost", None, num_gpus, free_shm_bytes(), address)
        return plan_island(self.settings, self.model, node, "doctor")

    @property
    def instance(self) -> InstanceConfig:
        """The configuration of one instance. Instances differ only in their names."""
        try:
            plan = self.island
        except ValueError:
            raise NotChecked("a plan") from None
        return next(spec.config for spec in plan.processes if isinstance(spec.config, InstanceConfig))
