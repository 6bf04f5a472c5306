"""Ignored parameters, which are unknown or without effect: named to the client, in the log, and in a metric."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence

log = logging.getLogger(__name__)

HEADER = "X-Ignored-Parameters"
# Names that the header and the log show. Others are a client's text, and may be anything.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Names that are logged, each once.
MAX_LOGGED = 64
# Labels of the metric: known parameters of other servers, and OTHER. None is a client's text.
OTHER = "other"
NAMES = frozenset(
    (
        *("early_stopping", "kv_transfer_params", "length_penalty", "lora_path", "mm_processor_kwargs"),
        *("num_beams", "prediction", "priority", "prompt_cache_retention", "request_id"),
        *("return_tokens_as_token_ids", "rid", "spaces_between_special_tokens"),
        *("stop_regex", "truncate_prompt_tokens", "typical_p", "vllm_xargs", "web_search_options"),
    )
)


class IgnoredParameters:
    def __init__(self) -> None:
        # The number of calls with the parameter, by its label.
        self.counts: Counter[str] = Counter()
        self._logged: set[str] = set()

    def note(self, names: Sequence[str]) -> dict[str, str]:
        """Counts the parameters of a call. Returns the header that names them."""
        shown = [name for name in names if _NAME.fullmatch(name)]
        for name in shown:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                log.info(
                    "%s: this parameter is ignored: it is unknown, or without effect on this model", name
                )
                self._logged.add(name)
        self.counts.update({name if name in NAMES else OTHER for name in names})
        return {HEADER: ", ".join(shown) or OTHER} if names else {}
