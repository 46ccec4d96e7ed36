# SPDX-License-Identifier: Apache-2.0
"""vLLM's samplers, with one kernel launch for temperature, filters and draw."""
