"""Runs the same workload with several settings, for `alignedserve simulate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Protocol

from alignedserve.cli.simulate.config import SimConfig
from alignedserve.cli.simulate.goodput import Goodput, find_goodput
from alignedserve.cli.simulate.traffic import RATE, at_rate, make_backlog, make_traffic
from alignedserve.cli.simulate.trial import Trial, TrialOutcome, Workload
from alignedserve.engine.config import EngineConfig
from alignedserve.kv.groups import LayerGroups, one_group
from alignedserve.kv.span import KvSpan
from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import check_policy, make_policy
from alignedserve.sim.foresight import Foresee, Roughly, nothing, oracle
from alignedserve.sim.host_links import Sharing
from alignedserve.sim.model_kv import ModelKv, with_kv
from alignedserve.sim.report import Objectives
from alignedserve.sim.scenario import Scenario
from alignedserve.sim.trace import rate_of
from alignedserve.sim.world import Overhead
from alignedserve.timing.cost import CostModel

MAX_MODEL_LEN = 16_384
# If the first rate of a search is too high, it starts again at an eighth of it, up to four times.
_NUM_LOWER, _LOWER = 4, 8.0
_GROWTH, _PRECISION = 2.0, 0.05


class Progress(Protocol):
    def begin(self, name: str, total: int) -> None: ...

    def advance(self) -> None: ...

    def tried(self, name: str, rate: float, attainment: float) -> None:
        """Reports a rate that a search has tried."""


@dataclass(frozen=True)
class Setting:
    policy: str
    num_prefill: int
    num_decode: int
    num_colocated: int = 0
    # Whether instances change their roles. The numbers are those at the start.
    change_roles: bool = False

    def __str__(self) -> str:
        if self.num_colocated:
            return f"{self.policy} {self.num_colocated} colocated"
        changing = ", changing" if self.change_roles else ""
        return f"{self.policy} {self.num_prefill}+{self.num_decode}{changing}"


@dataclass(frozen=True)
class Row:
    setting: Setting
    # Requests per second; None: all requests come at once, or there is only one.
    request_rate: float | None
    # None after a search that found no rate low enough.
    outcome: TrialOutcome | None
    # Each rate that a search tried, in requests per second, and the attainment at it.
    tried: list[tuple[float, float]]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Comparison:
    def __init__(
        self,
        config: SimConfig,
        cost: CostModel,
        engine: EngineConfig,
        router: RouterConfig,
        scheduling: SchedulingConfig,
        model: ModelKv | None = None,
    ) -> None:
        """`model`: the model of the cost model, if more about it is needed. Raises ValueError for settings that can't
        be simulated."""
        self._config = config
        if config.attention:
            cost = cost.with_attention(config.attention)  # type: ignore[arg-type]
        self._cost = with_kv(cost, engine.block_size, engine.kv_cache_dtype, config.pool_kv_dtype, model)
        self._engine = engine
        self._model = model
        self._router = router
        self._scheduling = scheduling
        traffic = make_traffic(config)
        # Without hash ids all prompts are different.
        self._shares_prefixes = engine.enable_prefix_caching and any(each.hash_ids for each in traffic)
        fixed = [Setting(policy, *each) for policy, each in product(config.policy, config.islands)]
        changing = [
            replace(each, change_roles=True)
            for each in fixed
            if router.change_roles and not each.num_colocated
        ]
        self.settings = fixed + changing
        are_colocated = all(each.num_colocated for each in self.settings)
        scheduling.check_share_blocks(are_colocated, config.pool_kv_dtype)
        self.scenarios = [self._scenario(setting) for setting in self.settings]
        if config.find_rate and not any(each.tier == "rt" for each in traffic):
            raise ValueError("find_rate: needs real time, which has objectives to meet")
        backlog = make_backlog(config, traffic) if config.be_backlog else ()
        whole = Workload(traffic, config.be_backlog, backlog, config.warmup_s)
        self.workload = whole.fitting(self.scenarios[0])
        self.num_too_long = len(traffic) - len(self.workload.traffic)

    @property
    def max_model_len(self) -> int:
        return self.scenarios[0].max_model_len

    def rows(self, progress: Progress) -> Iterator[Row]:
        run = self._search if self._config.find_rate else self._run
        for setting, scenario in zip(self.settings, self.scenarios, strict=True):
            yield run(setting, scenario, progress)

    def _run(self, setting: Setting, scenario: Scenario, progress: Progress) -> Row:
        return Row(setting, self._own_rate(), self._try(setting, scenario, self.workload, progress), tried=[])

    def _own_rate(self) -> float | None:
        traffic = self.workload.traffic
        return rate_of(traffic) if traffic[-1].time_s > traffic[0].time_s else None

    def _search(self, setting: Setting, scenario: Scenario, progress: Progress) -> Row:
        outcomes: dict[float, TrialOutcome] = {}

        def attainment_at(rate: float) -> float:
            if rate not in outcomes:
                workload = replace(self.workload, traffic=at_rate([*self.workload.traffic], rate))
                outcomes[rate] = self._try(setting, scenario, workload, progress)
                progress.tried(str(setting), rate, outcomes[rate].mixture.rt.attainment)
            return outcomes[rate].mixture.rt.attainment

        found = self._find(attainment_at)
        tried = [(rate, outcome.mixture.rt.attainment) for rate, outcome in outcomes.items()]
        return Row(setting, found.rate, outcomes.get(found.rate), tried)

    def _find(self, attainment_at: Callable[[float], float]) -> Goodput:
        rate, found = self._config.request_rate or RATE, Goodput()
        for _ in range(_NUM_LOWER):
            try:
                found = find_goodput(attainment_at, rate, self._config.attainment, _GROWTH, _PRECISION)
            except ValueError as error:
                raise ValueError(f"find_rate, num_prompts={self._config.num_prompts}: {error}") from None
            if found.rate:
                break
            rate /= _LOWER
        return found

    def _try(
        self, setting: Setting, scenario: Scenario, workload: Workload, progress: Progress
    ) -> TrialOutcome:
        progress.begin(str(setting), len(workload.traffic))
        return Trial(scenario, workload, progress.advance).run()

    # ---- settings -------------------------------------------------------------------------------------------------

    def _scenario(self, setting: Setting) -> Scenario:
        config, block_size = self._config, self._engine.block_size
        router = replace(self._router, link=config.link, change_roles=setting.change_roles)
        scheduling = replace(self._scheduling, policy=setting.policy)
        check_policy(make_policy(scheduling), self._engine, has_profile=True)
        if self._engine.hidden_cache and not setting.num_colocated:
            raise ValueError("hidden_cache: needs colocated_instances")
        most_tokens = self._most_tokens(setting)
        longest = self._model.max_model_len if self._model else MAX_MODEL_LEN
        max_model_len = config.max_model_len or min(MAX_MODEL_LEN, longest, most_tokens)
        if max_model_len > most_tokens:
            raise ValueError(f"max_model_len={max_model_len}: an instance holds {most_tokens} tokens")
        needed_bytes = -(-max_model_len // block_size) * block_size * self._cost.pool_bytes_per_token
        kv_bytes = self._num_columns * block_size * self._cost.kv_bytes_per_token
        num_decoding = setting.num_colocated or setting.num_decode
        pool_bytes = config.pool_memory_bytes or max(2 * num_decoding * kv_bytes, needed_bytes)
        if pool_bytes < needed_bytes:
            raise ValueError(
                f"pool_memory_bytes={pool_bytes}: does not hold one request of max_model_len={max_model_len}, "
                f"at {self._cost.pool_bytes_per_token:g} bytes per token"
            )
        return Scenario(
            self._cost,
            router,
            num_prefill=setting.num_prefill,
            num_decode=setting.num_decode,
            num_colocated=setting.num_colocated,
            block_size=block_size,
            max_num_seqs=self._engine.max_num_seqs,
            max_num_batched_tokens=self._engine.max_num_batched_tokens,
            max_model_len=max_model_len,
            pool_bytes=pool_bytes,
            slo=Objectives(_seconds(config.slo_ttft_ms), _seconds(config.slo_tbt_ms)),
            scheduling=scheduling,
            sharing=Sharing(config.shared_links, config.gpus_per_pcie_root, config.host_memory_bandwidth),
            foresee=_foresight(config.length_predictor, max_model_len),
            overhead=Overhead(config.pace, config.outside_ms / 1000),
            hidden_cache=self._engine.hidden_cache,
            enable_prefix_caching=self._shares_prefixes,
            groups=self._groups,
            is_checked=False,
        )

    def _most_tokens(self, setting: Setting) -> int:
        """Returns the most tokens of a request for which every kind of instance has blocks."""
        block_size, groups = self._engine.block_size, self._groups
        if not setting.num_colocated:  # A prefill instance holds whole prompts.
            return self._num_columns * block_size
        span = KvSpan.of(groups, block_size, self._engine.max_num_batched_tokens)
        return span.longest(self._num_columns * groups.num_groups) * block_size

    @property
    def _groups(self) -> LayerGroups:
        return self._model.groups if self._model else one_group(1)

    @property
    def _num_columns(self) -> int:
        """The number of columns for which an instance has blocks, if nothing is passed."""
        return self._cost.num_kv_tokens // self._engine.block_size


def _seconds(objective_ms: float) -> float:
    return objective_ms / 1000 or float("inf")


def _foresight(length_predictor: str, max_model_len: int) -> Foresee:
    match length_predictor:
        case "none":
            return nothing
        case "exact":
            return oracle(max_model_len)
        case _:
            return Roughly(max_model_len)
