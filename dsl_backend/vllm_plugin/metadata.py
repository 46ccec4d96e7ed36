# SPDX-License-Identifier: Apache-2.0
"""Planners that a metadata builder keeps, and the plans of a step, which its layers and like steps share."""

from dataclasses import dataclass, field
from typing import Any

import torch

from dsl_backend.attention import api
from dsl_backend.attention.dispatch import Operation, choose, judge
from dsl_backend.attention.plan import AttentionPlan, Planner
from dsl_backend.attention.spec import AttentionSpec, Batch
from dsl_backend.log import info_once
from dsl_backend.runtime import target as targets
from dsl_backend.runtime.dispatch import explained
from dsl_backend.runtime.workspace import Workspace, reset_all
from dsl_backend.vllm_plugin import compat
from dsl_backend.vllm_plugin.validation import kernel_for, kernel_for_keys


class Planners:
    """A metadata builder's planners, one for each distinct layer spec, on one workspace.

    Args:
        device: of the layers.
        kernel: the kernel that the user asked for by name; by default the best for each operation.
    """

    def __init__(self, device: torch.device, kernel: str | None = None) -> None:
        self.device, self.target = device, targets.detect(device)
        self.workspace = Workspace(device)
        self.kernel = kernel
        self._of: dict[AttentionSpec, Planner] = {}
        self._wakes = compat.wakes()
        # The longest queries whose plans do not depend on other lengths, of all planners so far; None: all queries.
        self._short: int | None = None
        self._place: object = None
        self._steps: dict[bool, StepPlans] = {}

    def begin_step(self) -> None:
        """Called before a step's first launch: zero the counters if the memory pools have woken since the last step."""
        wakes = compat.wakes()
        if wakes != self._wakes:
            self._wakes = wakes
            reset_all()

    def of(self, spec: AttentionSpec) -> Planner:
        """The spec's planner. Raises Unsupported: no kernel serves the spec, or not the one asked for."""
        planner = self._of.get(spec)
        if planner is None:
            planner = self._of[spec] = Planner(spec, self.target, self.workspace, kernel_for_keys(spec, self.kernel))
            limits = [limit for limit in (self._short, planner.short_limit) if limit is not None]
            self._short = min(limits, default=None)
            info_once(f"dsl serves attention of {spec} on {self.target.arch}: by {self.served_by(planner)}")
        return planner

    def plans_short(self, max_query_len: int) -> bool:
        """Whether plans of a batch with queries of up to max_query_len tokens depend on no other length.

        One kernel then serves all its requests, and neither `max_seq_len` nor `host_lengths` is read. Before there is a
        planner, one token is short.
        """
        if not self._of:
            return max_query_len <= 1
        return self._short is None or max_query_len <= self._short

    def steps_at(self, place: object) -> "dict[bool, StepPlans]":
        """The plans of the last step if it was at that place, or none yet; by whether keys are packed.

        A plan launches what is in its batch's memory at that time. Passes of a draft model differ in what is there, and
        in `max_seq_len`, which no plan of short queries depends on: one plan serves them all.

        Args:
            place: `place_of` the step's tensors, and all numbers that its plans depend on; None: no other step's.
        """
        if place is None or place != self._place:
            self._place, self._steps = place, {}
        return self._steps

    def prepare_writes(self, spec: AttentionSpec) -> None:
        """Compile the kernel that writes the spec's keys and values, if any. Raises Unsupported: none serves it."""
        if spec.page_size is not None:
            api.writer(spec, self.device, kernel_for(Operation.WRITE_KV, self.kernel)).prepare()

    def served_by(self, planner: Planner) -> str:
        """The kernel of each operation, and why better ones do not serve it."""
        titles = dict(planner.kernel_titles)
        if planner.spec.page_size is not None:
            write = Operation.WRITE_KV
            titles[write] = choose(write, planner.spec, self.target, kernel_for(write, self.kernel)).title
        judgements = [judge(operation, planner.spec, self.target) for operation in titles]
        return explained(judgements, list(titles.values()))


def place_of(*tensors: torch.Tensor) -> list[tuple[Any, ...]]:
    """Where tensors are, and how they lie there: who reads one reads another one that is equal in this.

    Step plans keep their batch's tensors, so that nothing else gets their memory as long as there are plans.
    """
    return [(one.data_ptr(), one.shape, one.stride(), one.dtype) for one in tensors]


@dataclass
class StepPlans:
    """A step's batch, and the plans that its layers have asked for so far."""

    batch: Batch
    planners: Planners
    made: dict[AttentionSpec, AttentionPlan] = field(default_factory=dict)

    def plan(self, spec: AttentionSpec) -> AttentionPlan:
        """The spec's plan: made for its first layer of the step, reused by the others.

        Raises:
            InvalidInput: the batch does not fit the spec.
            Unsupported: no kernel serves the spec.
        """
        plan = self.made.get(spec)
        if plan is None:
            api.check_batch(spec, self.batch)
            plan = self.made[spec] = self.planners.of(spec).plan(self.batch)
        return plan
