# SPDX-License-Identifier: Apache-2.0
"""Put benchmarks/ into the wheel as dsl_backend._benchmarks, so that `dsl-backend bench` works without a checkout.

A hook and not a `force-include` setting: an editable installation uses the checkout's own folder, not a copy of it.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BenchmarksHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"]["benchmarks"] = "dsl_backend/_benchmarks"
