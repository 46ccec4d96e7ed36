# SPDX-License-Identifier: Apache-2.0
"""Serves the routed experts of vLLM's models."""
